"""Answers requests by a handler's own code, each with its own status."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torchserve_openvino.errors import InvalidInputError, ItemError, NotExplainedError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.loading.archive_loading import ArchiveLoading, QuantizedModel
from torchserve_openvino.serving.loading.archive_manifest import has_f32
from torchserve_openvino.serving.observation.own_code import OwnCode
from torchserve_openvino.serving.ready import ReadyState
from torchserve_openvino.serving.requests.batch_answer import answer_enveloped, finish
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.envelopes import Envelope
from torchserve_openvino.serving.requests.isolation import run_isolated, server_fault
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.requests.metric_sink import MetricSink
from torchserve_openvino.serving.requests.phases import RequestTimes, current_requests
from torchserve_openvino.serving.requests.recording import Recorder
from torchserve_openvino.serving.requests.tracing import Tracing
from torchserve_openvino.serving.served import ServedModel, rejection_in
from torchserve_openvino.serving.torchserve.cached_metrics import metrics_of
from torchserve_openvino.serving.torchserve.context import context_of, only, positions_in, with_own_headers
from torchserve_openvino.serving.torchserve.frontend_limits import most_response_bytes
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
        model_name: The model's name on the server.
        model_version: Its version; empty if it has none.
        most_requests: The most requests of one call.
        turn: Whoever runs a user's own code, which need not be safe for threads, holds it.
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
        self.turn = threading.Lock()
        self.model_name, self.model_version, self.most_requests = "model", "", 1
        # The host's own object for metrics, and what was made of it.
        self._metrics_source: Any = None
        self._metrics: MetricSink | None = None

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
            NotExplainedError: See `check_explained`.
        """
        self.check_explained("explanations")
        served = getattr(self.handler, "model", None)
        self.handler.model = self.eager_model
        try:
            with self.own_code.explaining():
                yield
        finally:
            self.handler.model = served

    def check_explained(self, name: str) -> None:
        """Checks that the eager model has its weights, and gradients.

        Args:
            name: What is to be computed with it, plural.

        Raises:
            NotExplainedError: The model is quantized, or its weights were freed.
        """
        if isinstance(self.eager_model, QuantizedModel) or not has_f32(self.model_dir):
            raise NotExplainedError(f"a quantized model has no gradients: {name} need the model in f32")
        if self.served is not None and self.served.released:
            raise NotExplainedError(f"{name} need the weights that handler.openvino.release_weights: true has freed")

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> MetricSink | None:
        """What takes this worker's metrics; None if the host has nothing for them."""
        context = getattr(self.handler, "context", None)
        source = getattr(context, "metrics", None)
        if source is not self._metrics_source:
            self._metrics_source, self._metrics = source, metrics_of(context)
        return self._metrics

    @property
    def most_bytes(self) -> int | None:
        """The longest body that the host sends; None if it has no limit."""
        return most_response_bytes(getattr(self.handler, "context", None))

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        """Answers the requests of one call, each with its own status.

        Args:
            requests: The requests; all in the same envelope.

        Raises:
            SystemExit: The worker has to be replaced.
        """
        taken = self.recorder.take(requests) if self.recorder is not None else ()
        if self.health is not None and any(request.asks_health for request in requests):
            assert self.state is not None
            if all(request.asks_health for request in requests):
                # Where probes keep requests away, none would find that out.
                self.state.leave_if_due()
            responses = with_health(self.health, requests, self.counted)
        else:
            responses = self.counted(requests)
        if self.recorder is not None:
            self.recorder.keep(taken, responses)
        return responses

    def counted(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the responses to requests; counts them, measures times, and sends metrics after it."""
        self.before_call()
        self.counters.add("requests", len(requests))
        responses: list[Response] | None = None
        try:
            with self.times.call(requests, self.most_requests, self.metrics) as call:
                responses = self.responses(requests)
            return responses
        finally:
            if self.tracing is not None:
                self.tracing.record(call, responses)
            self.after_call()

    def before_call(self) -> None:
        """Prepares the worker's state for a call."""
        assert self.state is not None
        self.state.before_call()

    def after_call(self) -> None:
        """Sends metrics after a call."""
        assert self.state is not None
        self.state.after_call(self.metrics)

    def responses(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the responses to the requests of one call, which are not counted here."""
        kind = requests[0].envelope
        if kind is None:
            answers = self.answered([request.row for request in requests], requests)
            return finish(answers, requests, self.counters, self.most_bytes)
        envelope = Envelope(kind, self.model_name, self.model_version or None)
        return answer_enveloped(envelope, requests, self.answered, self.counters, self.most_items, self.most_bytes)

    def watched(self, run: Callable[..., Any], *args: Any) -> Any:
        """Calls ``run``, returns its result, and checks what fell back against the policy.

        Raises:
            ForbiddenFallbackError: The call fell back in a way that the policy refuses.
        """
        assert self.state is not None
        try:
            result = run(*args) if self.own_code.is_shipped else self.own_code.watch(partial(run, *args))
        except BaseException:
            self.state.watch.skip()
            raise
        requests = current_requests()
        self.state.watch.check(f"request {requests[0].id}" if len(requests) == 1 else "")
        return result

    def describe(self) -> dict[str, Any]:
        """Returns the report, for ``GET /models/NAME?customized=true``."""
        if self.state is not None:
            self.state.publish()
        serving = self.state.to_dict() if self.state is not None else {}
        own = {
            "serving": serving,
            "pid": os.getpid(),
            "model": self.model_name,
            "settings": self.config.summary,
            **({"recorded": self.recorder.to_dict()} if self.recorder is not None else {}),
            "workers": self.state.workers() if self.state is not None else [],
        }
        return {**self.report.to_dict(), **own}

    def answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Returns an answer or `ItemError` for each item.

        Args:
            items: What the handler gets of each request; of one in an envelope, any number.
            requests: The request of each item.
        """
        self.counters.add("items", len(items))
        return self.answer_items(items, requests)

    def answer_items(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Runs the handler's own steps; after a failure, on each item by itself."""
        handle, context = self.own_handle, context_of(self.handler.context, requests)
        positions, count = positions_in(context, requests, current_requests() or requests)

        def run(some: list[tuple[int, Any]]) -> list[Any]:
            with only(context, [positions[item] for item, _ in some], count):
                return self.watched(self._own, handle, [item for _, item in some], context)

        answers = run_isolated(list(enumerate(items)), run, lambda _, error: _fault(error), self.counters)
        return answers if requests[0].envelope is not None else with_own_headers(answers, context)


def _fault(error: Exception) -> ItemError:
    """Returns the refusal of an item: the request's fault if eager PyTorch rejects what it gives to the model."""
    refusal = rejection_in(error)
    return (
        server_fault(error) if refusal is None else InvalidInputError(f"the model does not take this input: {refusal}")
    )
