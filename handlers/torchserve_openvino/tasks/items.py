"""The common base of the shipped tasks: items are decoded separately, and a bad one does not affect the others."""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from torchserve_openvino.backend import eager_watch
from torchserve_openvino.backend.runtime.compare import is_finite
from torchserve_openvino.errors import (
    ForbiddenFallbackError,
    InexactValueError,
    InvalidInputError,
    ItemError,
    NonFiniteOutputError,
    NotExplainedError,
    first_line,
)  # fmt: skip
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.requests.isolation import isolated, run_isolated, server_fault
from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.task_handler import TaskHandler

logger = logging.getLogger(__name__)

NO_EXPLANATIONS = "this task has no explanations; ask /predictions/"

T = TypeVar("T")


class ItemHandler(TaskHandler):
    """A task: `decode` turns one request item into a value, `predict` a list of values into a list of answers."""

    # The model of a shipped task is not changed after loading.
    freezes = True
    # Whether `decode` is thread-safe and benefits from threads.
    decodes_in_parallel = False
    # All items of an enveloped request are decoded before any is answered.
    _most_items = 64

    @abstractmethod
    def decode(self, item: Any) -> Any:
        """Decodes one request item to a value.

        Raises:
            ItemError: The item is invalid; its sender gets the message, with the error's HTTP status.
        """

    def together(self, values: list[Any]) -> list[Any]:
        """Does what is faster for all decoded items of a batch at once; an item may become an `ItemError`."""
        return values

    def warm_decoding(self) -> None:
        """Runs, before READY, what makes the first request that is decoded slower than those that follow."""

    def _prepare(self, context: WorkerContext) -> Models | None:
        models = super()._prepare(context)
        begin_step("warming the decoding of requests")
        self.warm_decoding()
        return models

    @abstractmethod
    def predict(self, values: list[Any]) -> list[Any]:
        """Computes the answers to values, in the same order; an answer may be an `ItemError`."""

    @abstractmethod
    def run_eager(self, value: Any) -> Any:
        """Runs the eager model on one value, to see whether the model accepts it."""

    def explanation(self, value: Any) -> Any:
        """Explains the answer to one value, for /explanations/.

        Raises:
            NotExplainedError: This task has no explanations.
        """
        raise NotExplainedError(NO_EXPLANATIONS)

    def _answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Answers the items of a batch, in which TorchServe mixes requests to /predictions/ and to /explanations/."""
        self._openvino.counters.add("items", len(items))
        explained = [request.explains for request in requests]
        if not any(explained):
            return self.answer_items(items)
        answers: list[Any] = [None] * len(items)
        for kind, answer in ((False, self.answer_items), (True, self.explain_items)):
            positions = [position for position, flag in enumerate(explained) if flag is kind]
            if positions:
                some = answer([items[position] for position in positions])
                for position, prediction in zip(positions, some, strict=True):
                    answers[position] = prediction
        return answers

    def answer_items(self, items: list[Any]) -> list[Any]:
        """Returns an answer or an `ItemError` for each item."""
        return self._through(items, self._predicted)

    def explain_items(self, items: list[Any]) -> list[Any]:
        """Returns an explanation or an `ItemError` for each item."""
        return self._through(items, self._explained)

    def _through(self, items: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Decodes items, and asks for those that can be decoded."""
        start = time.perf_counter()
        answers = self._call_all(self.decodes_in_parallel, [partial(self._decoded, item) for item in items])
        # The items that are not refused, by their position: twice, since some are refused beside others only.
        steps = (ask,) if type(self).together is ItemHandler.together else (self._together, ask)
        for step in steps:
            answered = {position: value for position, value in enumerate(answers) if not isinstance(value, ItemError)}
            if answered:
                for position, value in zip(answered, step(list(answered.values())), strict=True):
                    answers[position] = value
        self.record_time("HandlerTime", start)
        return answers

    def _decoded(self, item: Any) -> Any:
        return isolated(partial(self._own_code.watch, partial(self.decode, item)))

    def _call_all(self, in_parallel: bool, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Returns the results of calls, in order; in parallel, they share the threads that OpenVINO has."""
        return self._threads.run(calls) if in_parallel else [call() for call in calls]

    @cached_property
    def _threads(self) -> ParallelCalls:
        """The threads for what items need beside the model: as many as OpenVINO has."""
        threads = self._openvino.report.tracker.config.get("threads", {}).get("openvino_threads")
        return ParallelCalls(threads or 1)

    def _together(self, values: list[Any]) -> list[Any]:
        """Runs `together`; after a failure for each item by itself, so that one cannot fail the others."""

        def run(some: list[Any]) -> list[Any]:
            return self._own_code.watch(partial(self.together, some))

        return run_isolated(values, run, lambda _, error: server_fault(error), self._openvino.counters)

    def _predicted(self, values: list[Any]) -> list[Any]:
        worker = self._openvino
        return run_isolated(values, partial(worker.watched, self.predict), self._blame, worker.counters)

    def _explained(self, values: list[Any]) -> list[Any]:
        def run(some: list[Any]) -> list[Any]:
            return [self.explanation(value) for value in some]

        # One by one, so that an explanation is not computed again after another has failed.
        explanations = (
            run_isolated([value], run, lambda _, error: server_fault(error), self._openvino.counters)
            for value in values
        )
        return [answer for answers in explanations for answer in answers]

    def in_eager(self, name: str, run: Callable[[], T]) -> T:
        """Returns the result of ``run``, which computes with the eager model, and counts it as that.

        Args:
            name: What it computes, for the report.
            run: The computation.

        Raises:
            ForbiddenFallbackError: The policy does not allow it; nothing is computed then.
            NotExplainedError: The eager model can't compute it.
        """
        self._openvino.check_explained(name)
        if not self._openvino.config.pt2.enabled:
            # Then everything runs there.
            return run()
        policy = self._openvino.config.openvino.fallback
        allowed = policy.allow == "all" or "outside_compiled" in policy.allow
        if policy.on_violation == "refuse" and not allowed:
            raise ForbiddenFallbackError(f"outside_compiled: {name} run in eager PyTorch", by_request=True)
        seen: list[eager_watch.Eager] = []
        start = time.perf_counter()
        result = eager_watch.EagerWatch([], seen.append).watch(run)
        seconds = time.perf_counter() - start
        # What is counted is one pass through the model, however many the computation has.
        largest = max(seen, key=lambda computation: computation.ops, default=eager_watch.Eager(None, "", "", ""))
        reason = "they need gradients, which compiled graphs do not have"
        if self._openvino.report.tracker.add_uncompiled(
            name, largest.where, largest.ops, seconds, reason, caused_by_request=True
        ):
            logger.warning("Fallback: %s run in eager PyTorch, outside every compiled graph", name)
        if self._openvino.state is not None:
            self._openvino.state.watch.check()
        return result

    def _blame(self, value: Any, error: Exception) -> ItemError:
        """Blames the request, with eager's message, if eager PyTorch fails on the value as well; else the server."""
        if self._openvino.served is not None and self._openvino.served.released:
            # The eager model is gone; a value outside OpenVINO's range is the request's fault in any case.
            return InvalidInputError(str(error)) if isinstance(error, InexactValueError) else server_fault(error)
        try:
            # This run is no answer, so it is not counted as work outside the compiled graphs.
            with torch.inference_mode(), eager_watch.compiled():
                self.run_eager(value)
        except Exception as refusal:
            text = first_line(refusal)
            return InvalidInputError(f"the model does not take this input: {text}")
        return server_fault(error)

    def check_finite(self, tensors: list[torch.Tensor]) -> None:
        """Checks that one item's outputs are finite.

        Raises:
            NonFiniteOutputError: An output holds NaN or infinity, and ``outputs.non_finite`` is ``refuse``.
        """
        if self._openvino.config.openvino.outputs.non_finite == "allow":
            return
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() and not is_finite(tensor):
                raise NonFiniteOutputError(f"output {index} holds NaN or infinity for this input")


def body(item: Any) -> Any:
    """Returns what a request sent: its ``data`` or ``body``, or the item itself if an envelope was opened.

    Raises:
        InvalidInputError: Both are missing or empty.
    """
    if not isinstance(item, dict):
        return item
    for name in ("data", "body"):
        value = item.get(name)
        if value is not None and not (isinstance(value, (bytes, bytearray, str, list)) and len(value) == 0):
            return value
    # TorchServe has split a form at & and =, decoded + and %, and left out what is empty: nothing of it can be told.
    raise InvalidInputError(
        "the request has no body, or one that came as a form (application/x-www-form-urlencoded, which curl -d and "
        "--data-binary send unless told otherwise): send a text with -H 'content-type: text/plain', JSON with "
        "-H 'content-type: application/json', a file with curl -T FILE, or anything as the form field 'data' "
        "(curl -F data=@FILE)"
    )
