"""Answers requests by a handler's own code, each with its own status."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torchserve_openvino.errors import InvalidInputError, ItemError, NotExplainedError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.base import model_name
from torchserve_openvino.serving.loading.archive import is_quantized
from torchserve_openvino.serving.loading.model import ArchiveLoading
from torchserve_openvino.serving.observation.own_code import OwnCode
from torchserve_openvino.serving.ready import ReadyState
from torchserve_openvino.serving.requests.batch_answer import answer_enveloped, finish
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Envelope
from torchserve_openvino.serving.requests.isolation import only, run_isolated, server_fault
from torchserve_openvino.serving.requests.phases import RequestTimes
from torchserve_openvino.serving.requests.recording import Recorder
from torchserve_openvino.serving.requests.tracing import Tracing
from torchserve_openvino.serving.served import ServedModel, rejection_in
from torchserve_openvino.serving.verification.health import Health, with_health

# The worker whose handler is answering a batch: a `handle` that calls its base's must not start over.
_answering: ContextVar["Answering | None"] = ContextVar("answering", default=None)


class Answering(ArchiveLoading):
    """Runs the code of one handler, and answers requests by it.

    Args:
        handler: An object with the steps of TorchServe's BaseHandler.
        mixin: The class in the handler's method resolution order behind which its own `handle` is looked up.

    Attributes:
        eager_model: The model as loaded.
        served: Runs the calls of the handler's ``model``, padding batches to compiled sizes; None in eager PyTorch.
        report: What ran where, and why.
        counters: Counts of what happened to requests.
        times: Where their time went.
        tracing: Sends spans of requests; None without ``handler.openvino.tracing``.
        recorder: Keeps some requests; None without ``handler.openvino.record``.
        state: The worker's state after READY; None before.
        health: Whether the worker answers its warm-up sample rightly; None before READY.
        own_code: Runs and watches the handler's own code.
        overrides: Callables that the handler put in the place of its own `handle` or `initialize`, by name.
    """

    def __init__(self, handler: Any, mixin: Any) -> None:
        super().__init__(handler)
        self.mixin = mixin
        self.eager_model: Any = None
        self.served: ServedModel | None = None
        self.report = CompileReport(Tracker())
        self.counters = Counters()
        self.times = RequestTimes()
        self.tracing: Tracing | None = None
        self.recorder: Recorder | None = None
        self.state: ReadyState | None = None
        self.health: Health | None = None
        self.own_code = OwnCode(handler, self)
        self.overrides: dict[str, Callable[..., Any]] = {}

    # --- the handler's own code -----------------------------------------------------------------------------------

    @property
    def own_handle(self) -> Callable[..., Any]:
        """The handler's `handle` without this package: micro-batching's, a subclass's, or that of its other bases."""
        if (own := self.overrides.get("handle")) is not None:
            return own
        handle = type(self.handler).handle
        if handle is self.mixin.handle:
            others: Any = super(self.mixin, self.handler)
            return others.handle
        return handle.__get__(self.handler)

    @property
    def most_items(self) -> int | None:
        """The most items in one enveloped request; None leaves it to the user's own code."""
        return None

    @property
    def is_answering(self) -> bool:
        """Whether the handler's own `handle` is running, in this thread."""
        return _answering.get() is self

    def _own(self, handle: Callable[..., Any], items: list[Any], context: Any) -> Any:
        token = _answering.set(self)
        try:
            return handle(items, context)
        finally:
            _answering.reset(token)

    def run_own(self, items: list[Any]) -> Any:
        """Runs a batch through the handler's own code, as requests would go."""
        token = _answering.set(self)
        try:
            return self.own_code.run(self.own_handle, items, self.handler.context)
        finally:
            _answering.reset(token)

    def run_sample(self, body: bytes) -> Any:
        """Answers one request's body outside of any server, after the handler was loaded."""
        return self.own_code.run(self.handler.handle, [{"body": body}], self.handler.context)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Lets TorchServe's explanations use the eager model: they hook into its layers and need gradients.

        Raises:
            NotExplainedError: The model is quantized, and has no gradients.
        """
        if is_quantized(self.model_dir):
            raise NotExplainedError("a quantised model has no gradients: explanations need the model in f32")
        served = getattr(self.handler, "model", None)
        self.handler.model = self.eager_model
        try:
            with self.own_code.explaining():
                yield
        finally:
            self.handler.model = served

    # --- requests -------------------------------------------------------------------------------------------------

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers a batch of requests, then sends the metrics that changed."""
        self.handler.context = context
        if self.handler._is_describe():
            return [self.handler.describe_handle()]
        return with_health(self.health, data, context, self._handle)

    def _handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        with self.recorded(data, context):
            return self.accounted(context, lambda: finish(self.answered(data, context), context, self.counters))

    def recorded(self, data: list[dict[str, Any]], context: Any) -> AbstractContextManager[None]:
        """Keeps some of a call's requests, if ``handler.openvino.record`` is set and the call inside answers them."""
        return nullcontext() if self.recorder is None else self.recorder.of(data, context)

    def accounted(self, context: Any, answer: Callable[[], list[Any]]) -> list[Any]:
        """Returns the result of ``answer``; counts the requests of the batch, and sends metrics after it."""
        state = self.state
        assert state is not None
        state.before_call(context)
        size = len(getattr(context, "request_ids", None) or ()) or 1
        self.counters.add("requests", size)
        try:
            return self._measured(context, size, answer)
        finally:
            state.after_call(context)

    def _measured(self, context: Any, size: int, answer: Callable[[], list[Any]]) -> list[Any]:
        failed = True
        try:
            with self.times.call(context, size) as call:
                answers = answer()
            failed = False
            return answers
        finally:
            if self.tracing is not None:
                self.tracing.record(context, call, failed=failed)

    def watched(self, run: Callable[[], Any]) -> Any:
        """Calls ``run``, returns its result, and checks what fell back against the policy.

        Raises:
            ForbiddenFallbackError: The call fell back in a way that the policy refuses.
        """
        assert self.state is not None
        try:
            result = self.own_code.watch(run)
        except BaseException:
            self.state.watch.skip()
            raise
        ids = list((getattr(self.handler.context, "request_ids", None) or {}).values())
        self.state.watch.check(f"request {ids[0]}" if len(ids) == 1 else "")
        return result

    def describe(self) -> dict[str, Any]:
        """Returns the report, for ``GET /models/NAME?customized=true``."""
        if self.state is not None:
            self.state.publish()
        serving = self.state.to_dict() if self.state is not None else {}
        own = {
            "serving": serving,
            "pid": os.getpid(),
            "model": model_name(getattr(self.handler, "context", None)),
            "settings": self.config.summary,
            **({"recorded": self.recorder.to_dict()} if self.recorder is not None else {}),
            "workers": self.state.workers() if self.state is not None else [],
        }
        return {**self.report.to_dict(), **own}

    def answered(self, items: list[Any], context: Any, owners: Sequence[int] | None = None) -> list[Any]:
        """Returns an answer or `ItemError` for each item; ``owners`` are their requests' positions in an envelope."""
        self.counters.add("items", len(items))
        return self.answer_items(items, context)

    def answer_items(self, items: list[Any], context: Any) -> list[Any]:
        """Runs the handler's own steps; after a failure, on each item by itself."""
        handle = self.own_handle

        def run(some: list[tuple[int, Any]]) -> list[Any]:
            with only(context, [position for position, _ in some], len(items)):
                return self.watched(lambda: self._own(handle, [item for _, item in some], context))

        return run_isolated(list(enumerate(items)), run, lambda _, error: _fault(error), self.counters)

    def handle_envelope(self, envelope: Envelope, data: list[dict[str, Any]], context: Any) -> Any:
        """Answers a batch of requests that came in one of TorchServe's envelopes."""
        self.handler.context = context
        if self.handler._is_describe():
            return [self.handler.describe_handle()]

        def answer_items(items: list[Any], owners: Sequence[int]) -> list[Any]:
            return self.answered(items, context, owners)

        def answer(some: list[Any], context: Any) -> list[Any]:
            parts = envelope, some, context, answer_items, self.counters, self.most_items
            with self.recorded(some, context):
                return self.accounted(context, lambda: answer_enveloped(*parts))

        return with_health(self.health, data, context, answer)


def _fault(error: Exception) -> ItemError:
    """Returns the refusal of an item: the request's fault if eager PyTorch rejects what it gives to the model."""
    refusal = rejection_in(error)
    return (
        server_fault(error) if refusal is None else InvalidInputError(f"the model does not take this input: {refusal}")
    )
