"""Generates text: prompts and chats in, text out, whole or piece by piece; in OpenAI's form and in our own."""

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchserve_openvino.errors import (
    BusyError,
    ForbiddenFallbackError,
    ItemError,
    NotExplainedError,
    PayloadTooLargeError,
)
from torchserve_openvino.generation.text.engine import Engine
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.base import model_name
from torchserve_openvino.serving.context import WorkerContext
from torchserve_openvino.serving.host.frontend_limits import most_response_bytes
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.metrics import metrics_of
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.requests.batch_answer import answer_enveloped, explains, identified, set_status, shown
from torchserve_openvino.serving.requests.envelopes import Envelope, status_of
from torchserve_openvino.serving.requests.isolation import isolated, server_fault
from torchserve_openvino.serving.requests.pieces import is_gone
from torchserve_openvino.serving.requests.response_body import sendable
from torchserve_openvino.serving.verification.health import asks_health, with_health
from torchserve_openvino.tasks.generation import torchserve_stream
from torchserve_openvino.tasks.generation.active_request import ActiveRequest, wait_for_any
from torchserve_openvino.tasks.generation.answers import FORMS, Generated
from torchserve_openvino.tasks.generation.call import Call
from torchserve_openvino.tasks.generation.endpoints import PROMPT, endpoint_of
from torchserve_openvino.tasks.generation.engines import ASYNC, ConfigOnly, EngineSource, Generator, started
from torchserve_openvino.tasks.generation.fields import TextParameters
from torchserve_openvino.tasks.generation.metrics import GenerationMetrics
from torchserve_openvino.tasks.generation.reading import Limits, Reader
from torchserve_openvino.tasks.generation.supervised_engine import SupervisedEngine
from torchserve_openvino.tasks.hub import HubHandler
from torchserve_openvino.tasks.items import NO_EXPLANATIONS, body
from torchserve_openvino.tasks.openai import MODELS, models_body, openai_error, path_of

logger = logging.getLogger(__name__)

# Requests that one worker holds at once; the engine refuses more before that (generate.max_waiting).
_THREADS = 512
_LOOK_SECONDS = 0.5


class TextGenerator(HubHandler):
    """Text that goes on where a prompt ends, by a language model in an engine of its own.

    Attributes:
        tokenizer: The model's tokenizer.
        flat: The field of a request whose parameters stand beside it.
    """

    task = "text_generator"
    parameters = TextParameters
    takes = str
    answers = Generated
    flat: ClassVar[str] = PROMPT

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self._kept: SupervisedEngine | None = None
        self._reader: Reader | None = None
        self._special: frozenset[int] = frozenset()
        self._measures: GenerationMetrics | None = None
        self._frontend: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "request")
        # Several threads may end their requests at once.
        self._books = threading.Lock()

    # --- loading ----------------------------------------------------------------------------------------------

    def _started(self, context: Any) -> None:
        version = str((context.manifest or {}).get("model", {}).get("modelVersion") or "")
        if self._kept is not None and (metrics := metrics_of(context)) is not None:
            self._measures = GenerationMetrics(metrics, self._kept.load, version)
        if self._openvino.health is not None and self._kept is not None:
            self._openvino.health.checks.append(self._dead)
        if self._openvino.config.torchserve.get(ASYNC):
            self._frontend = torchserve_stream.checked_frontend(context)

    def _dead(self) -> str:
        """Returns why the engine does not generate; empty if it does."""
        return self._kept.dead or "" if self._kept is not None else ""

    def load(self, folder: Path) -> Any:
        """Loads the tokenizer, and the model if it generates in eager PyTorch; otherwise its engine loads it."""
        self.tokenizer = hub.load_tokenizer(folder)
        self._special = frozenset(self.tokenizer.all_special_ids)
        return ConfigOnly(hub.load_config(folder)) if self._openvino.config.pt2.enabled else super().load(folder)

    def _prepare(self, context: WorkerContext) -> Models | None:
        """Starts the engine, whose answers are compared with eager PyTorch's before READY."""
        section = self._openvino.config.openvino
        source = EngineSource(self.folder, context, self.tokenizer)
        self._kept = SupervisedEngine(partial(started, source, self._openvino.eager_model), self._started_again)
        atexit.register(self._kept.close)
        vocabulary = int(self._openvino.eager_model.config.get_text_config().vocab_size)
        limits = Limits(
            section.generate.max_tokens, self.engine.max_length, section.text.max_bytes, section.text.max_inputs,
            vocabulary,
        )  # fmt: skip
        self._reader = Reader(self.tokenizer, model_name(self.context), limits)
        self._openvino.report = CompileReport(self._kept.generator.tracker)
        return None

    def _started_again(self, generator: Generator) -> None:
        generator.tracker.set_config("threads", self._openvino.report.tracker.config.get("threads"))
        self._openvino.report.follow(CompileReport(generator.tracker))

    def _summary(self, models: Models | None) -> str:
        assert self._kept is not None
        line = self._kept.generator.summary()
        return f"{line}; {self._openvino.report.summary_line()}" if self._openvino.config.pt2.enabled else line

    @property
    def engine(self) -> Engine:
        """The engine."""
        assert self._kept is not None
        return self._kept.engine

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, with what generates and what it does now."""
        found = super().describe_handle()
        if self._kept is not None:
            found["generate"] = {**self._kept.generator.describe(), **self._frontend}
        return found

    # --- requests ---------------------------------------------------------------------------------------------

    def handle(self, data: list[dict[str, Any]], context: Any) -> Any:
        """Answers a batch of requests; returns a coroutine where TorchServe awaits it (``asyncCommunication``)."""
        self.context = context
        torchserve_stream.one_at_a_time(context)
        if self._is_describe():
            return self._awaited(lambda: [self.describe_handle()], ends=context)
        if torchserve_stream.awaits():
            if asks_health(context, 0):
                return self._awaited(
                    lambda: with_health(self._openvino.health, data, context, self._alone), ends=context
                )
            return self._awaited(lambda: self._alone_recorded(data, context))
        return with_health(self._openvino.health, data, context, self._together)

    def _together(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        state = self._openvino.state
        assert state is not None
        state.before_call(context)
        try:
            with self._openvino.recorded(data, context):
                return self._together_in_engine(data, context)
        finally:
            state.after_call(context)

    def handle_envelope(self, envelope: Envelope, data: list[dict[str, Any]], context: Any) -> Any:
        """Answers requests in one of TorchServe's envelopes, which knows neither streams nor OpenAI's endpoints."""
        self.context = context
        torchserve_stream.one_at_a_time(context)
        if self._is_describe():
            return self._awaited(lambda: [self.describe_handle()], ends=context)

        def answer_items(items: list[Any], owners: Sequence[int]) -> list[Any]:
            return self.answer_items(items, context)

        def answered() -> list[Any]:
            with self._openvino.recorded(data, context):
                return answer_enveloped(
                    envelope, data, context, answer_items, self._openvino.counters, self._most_items
                )

        return (
            self._awaited(lambda: self._alone_enveloped(answered, context))
            if torchserve_stream.awaits()
            else answered()
        )

    def _alone_enveloped(self, answered: Callable[[], list[Any]], context: Any) -> list[Any]:
        """Answers the only request of a call, in a thread of its own; raises nothing."""
        try:
            (answer,) = answered()
        except Exception as error:
            refused = Call()
            refused.answer = server_fault(error)
            answer = self._settled(context, 0, refused)
        return torchserve_stream.sent(context, answer)

    def _awaited(self, run: Callable[[], list[Any]], ends: Any = None) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Returns the result, or in an event loop what waits for it: the whole answer of the call with a context."""
        if not torchserve_stream.awaits():
            return run()
        if ends is not None:
            torchserve_stream.end(ends)

        async def wait() -> list[Any]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)

        return wait()

    def answer_items(self, items: list[Any], context: Any) -> list[Any]:
        """Returns the answer to each item, or its refusal."""
        return self.predict([self.decode(item) for item in items])

    def decode(self, item: Any) -> Call:
        """Starts what an item asks; a refusal is kept in what is returned."""
        # An envelope passes on the request itself, where TorchServe would give it a name.
        bare = isinstance(item, dict) and not item.keys() & {"data", "body"}
        return self._called({"body": item} if bare else item, "")

    def predict(self, values: list[Call]) -> list[Any]:
        """Generates until all are done, and returns their answers."""
        self._finish(values, self.context, [False] * len(values), own_requests=False)
        return [call.whole() for call in values]

    def run_eager(self, value: Any) -> Any:
        """Is not called: the engine checks prompts before it takes them."""
        raise NotImplementedError

    def _together_in_engine(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers a batch: its requests run together in the engine, and the batch ends with the last of them."""
        calls = [self._request(item, context, place) for place, item in enumerate(data)]
        self._count(calls)
        self._finish(calls, context, [call.streams for call in calls])
        self._check_policy(calls)
        bodies = []
        for place, call in enumerate(calls):
            bodies.append(call.pieces() if call.streams else self._settled(context, place, call))
        return bodies

    def _alone_recorded(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        with self._openvino.recorded(data, context):
            return self._alone(data, context)

    def _alone(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers the only request of a call, in a thread of its own; raises nothing."""
        call = Call()
        try:
            call = self._request(data[0], context, 0)
            self._count([call])
            self._finish([call], context, [call.streams])
            self._check_policy([call])
        except Exception as error:
            call.fail(server_fault(error))
        if call.streams:
            torchserve_stream.send(context, {0: call.pieces()})
            ended = torchserve_stream.ended(context)
        else:
            ended = torchserve_stream.sent(context, self._settled(context, 0, call))
        with self._books:
            if self._openvino.state is not None:
                self._openvino.state.after_call(context)
        return ended

    def _finish(self, calls: Sequence[Call], context: Any, streams: Sequence[bool], own_requests: bool = True) -> None:
        """Generates until all are done; sends pieces of those that stream, and ends those whose client has hung up.

        Args:
            calls: What is generated.
            context: The call's context.
            streams: Whether each is sent in pieces.
            own_requests: Whether each is a request of the call; an envelope may hold several in one.
        """
        exchanges = [call.exchange for call in calls if call.exchange is not None]
        if self._measures is not None:
            self._measures.on_request()
        try:
            while not all(call.done for call in calls):
                wait_for_any(exchanges, _LOOK_SECONDS)
                for place, call in enumerate(calls):
                    if own_requests and not call.done and is_gone(context, place):
                        call.fail(BusyError("the client hung up"))
                pieces = {
                    place: text
                    for place, call in enumerate(calls)
                    if streams[place] and call.streams and not call.done and (text := call.pieces())
                }
                if pieces:
                    torchserve_stream.send(context, pieces)
        finally:
            for exchange in exchanges:
                exchange.cancel()
        if self._measures is not None and (metrics := metrics_of(context)) is not None:
            for exchange in exchanges:
                self._measures.on_response(metrics, exchange)

    def _check_policy(self, calls: Sequence[Call]) -> None:
        """Refuses requests during which something fell back that the policy refuses; whose it was, no one can tell."""
        if self._openvino.state is None:
            return
        try:
            self._openvino.state.watch.check()
        except ForbiddenFallbackError as error:
            for call in calls:
                call.fail(error)

    def _count(self, calls: Sequence[Call]) -> None:
        self._openvino.counters.add("requests", len(calls))
        self._openvino.counters.add("items", len(calls))

    # --- one request ------------------------------------------------------------------------------------------

    def _request(self, item: Any, context: Any, place: int) -> Call:
        """Starts what a request asks, at the endpoint that its URL names."""
        path = path_of(context, place)
        call = self._called(item, path) if not explains(context, place) else Call()
        if explains(context, place):
            call.answer = NotExplainedError(NO_EXPLANATIONS)
        if call.exchange is not None and call.exchange.request.stream:
            context.set_response_content_type(place, "text/event-stream")
        return call

    def _called(self, item: Any, path: str) -> Call:
        call = Call()
        assert self._reader is not None and self._kept is not None
        name = model_name(self.context)
        try:
            call.openai = bool(path)
            endpoint = endpoint_of(path)
            if endpoint.partition("/")[0] == MODELS:
                call.answer = models_body(endpoint, {name: self._loaded})
                return call
            request = self._reader.read(endpoint, body(item))
            if dead := self._kept.dead:
                # It starts again by itself, unless that failed.
                self._kept.revive()
                raise BusyError(f"{dead}. The engine starts again; try again later.")
            call.exchange = ActiveRequest(request, self.engine, self._reader.decode, self._special)
            call.bodies = FORMS[request.form](request, name, self._reader.decode)
        except ItemError as error:
            call.answer = error
        except MemoryError:
            call.answer = PayloadTooLargeError("this worker has not enough memory for this request")
        except Exception as error:
            call.answer = server_fault(error)
        return call

    def _settled(self, context: Any, place: int, call: Call) -> Any:
        """Returns the body of an answer in one piece; sets its status and content type in the context."""
        answer = call.whole()
        if not isinstance(answer, ItemError):
            sent = isolated(lambda: sendable(shown(answer), most_response_bytes(context)))
            answer = sent if isinstance(sent, ItemError) else answer
        if isinstance(answer, ItemError):
            self._openvino.counters.add(f"refused_{answer.status}")
            set_status(context, place, answer.status)
            context.set_response_content_type(place, "application/json")
            return identified(openai_error(answer) if call.openai else shown(answer), answer, context, place)
        if isinstance(answer, list):
            for each in answer:
                if isinstance(each, ItemError):
                    self._openvino.counters.add(f"refused_{each.status}")
            set_status(context, place, status_of(answer))
        context.set_response_content_type(place, "application/json")
        return sent
