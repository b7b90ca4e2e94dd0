"""Generates text: prompts and chats in, text out, whole or piece by piece; in OpenAI's form and in our own."""

import atexit
import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchserve_openvino.errors import (
    BusyError,
    ForbiddenFallbackError,
    ItemError,
    NotExplainedError,
    PayloadTooLargeError,
    is_out_of_memory,
)
from torchserve_openvino.generation.text.engine import Engine
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.requests.batch_answer import finish
from torchserve_openvino.serving.requests.isolation import server_fault
from torchserve_openvino.serving.requests.messages import EVENT_STREAM, JSON, Request, Response
from torchserve_openvino.serving.requests.phases import MeasuredInference
from torchserve_openvino.serving.torchserve.asynchronous import checked_frontend
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.generation.active_request import ActiveRequest, wait_for_any
from torchserve_openvino.tasks.generation.answers import FORMS, Generated, Plain, event
from torchserve_openvino.tasks.generation.engines import (
    ASYNC,
    ConfigOnly,
    EngineSource,
    Generator,
    SupervisedEngine,
    started,
)
from torchserve_openvino.tasks.generation.generation_metrics import GenerationMetrics
from torchserve_openvino.tasks.generation.reading import PROMPT, GenerationLimits, RequestReader, endpoint_of
from torchserve_openvino.tasks.generation.text_parameters import TextParameters
from torchserve_openvino.tasks.hub_handler import HubHandler
from torchserve_openvino.tasks.items import NO_EXPLANATIONS, body
from torchserve_openvino.tasks.openai import LAST_EVENT, MODELS, models_body, openai_error
from torchserve_openvino.tasks.task_handler import TaskWorker

# --- one request of a call to a handler: what is generated for it, and what is sent -------------------------------


class GenerationCall:
    """One request of a call to `handle`.

    Attributes:
        openai: Whether it was sent to one of OpenAI's endpoints, and so gets errors in their form.
        exchange: What is generated; None if the answer is known already.
        bodies: Writes its answer.
        answer: The answer that is known already, or the refusal.
        begun: Whether a piece of the answer was sent.
        ended: Whether its end was sent.
    """

    def __init__(self) -> None:
        self.openai = False
        self.exchange: ActiveRequest | None = None
        self.bodies: Plain | None = None
        self.answer: Any = None
        self.begun = self.ended = False

    @property
    def streams(self) -> bool:
        """Whether its answer is sent piece by piece; one that fails before its first piece is refused instead."""
        exchange = self.exchange
        return exchange is not None and exchange.request.stream and (self.begun or exchange.error is None)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.exchange is None or self.exchange.done

    def fail(self, error: ItemError) -> None:
        """Refuses the request, or ends its stream with the error."""
        if self.exchange is None:
            self.answer = error
        else:
            self.exchange.cancel()
            self.exchange.error = error

    def pieces(self) -> str:
        """Returns the events of a stream that are new, with its end once it is done."""
        exchange, bodies = self.exchange, self.bodies
        assert exchange is not None and bodies is not None
        if self.ended:
            return ""
        try:
            events = [bodies.piece(exchange, choice, delta) for choice, delta in exchange.deltas()]
        except Exception as error:
            self.fail(server_fault(error))
            events = []
        if (events or exchange.done) and not self.begun:
            self.begun = True
            events = [*bodies.begin(exchange), *events]
        if not exchange.done:
            return "".join(map(event, events))
        self.ended = True
        events += bodies.end(exchange) if exchange.error is None else [bodies.error(exchange.error)]
        return "".join(map(event, events)) + LAST_EVENT

    def whole(self) -> Any:
        """Returns the answer, or its refusal, once it is done."""
        exchange, bodies = self.exchange, self.bodies
        if exchange is None or bodies is None:
            return self.answer
        if exchange.error is not None:
            return exchange.error
        try:
            for _ in exchange.deltas():
                pass
            return bodies.whole(exchange)
        except Exception as error:
            # Other requests go on, whatever is wrong with this one.
            return server_fault(error)


# --- generates text: prompts and chats in, text out, whole or piece by piece; in OpenAI's form and in our own -----


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class GeneratingWorker(TaskWorker):
    """The worker of a text generator: several calls may run at once, whose requests join each other in the engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Calls that run now.
        self._calls = 0
        self._counting = threading.Lock()

    def before_call(self) -> None:
        """Prepares the worker's state for the first of several calls that run at once."""
        with self._counting:
            if not self._calls:
                super().before_call()
            self._calls += 1

    def after_call(self) -> None:
        """Sends metrics after a call, one thread at a time."""
        with self._counting:
            self._calls -= 1
            super().after_call()


class TextGenerator(HubHandler):
    """Text that goes on where a prompt ends, by a language model in an engine of its own.

    Attributes:
        tokenizer: The model's tokenizer.
        flat: The field of a request whose parameters stand beside it.
    """

    _openvino_worker = GeneratingWorker
    task = "text_generator"
    parameters = TextParameters
    takes = str
    answers = Generated
    flat: ClassVar[str] = PROMPT

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self._kept: SupervisedEngine | None = None
        self._reader: RequestReader | None = None
        self._special: frozenset[int] = frozenset()
        self._measures: GenerationMetrics | None = None
        self._frontend: dict[str, str] = {}

    # --- loading ----------------------------------------------------------------------------------------------

    def _started(self) -> None:
        if self._kept is not None and (metrics := self._openvino.metrics) is not None:
            self._measures = GenerationMetrics(metrics, self._kept.load, self._openvino.model_version)
        if self._openvino.health is not None and self._kept is not None:
            self._openvino.health.checks.append(self._dead)
        if self._openvino.config.torchserve.get(ASYNC):
            self._frontend = checked_frontend(self.context)

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
        limits = GenerationLimits(
            section.generate.max_tokens, self.engine.max_length, section.text.max_bytes, section.text.max_inputs,
            vocabulary,
        )  # fmt: skip
        self._reader = RequestReader(self.tokenizer, self._openvino.model_name, limits)
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
        report = super().describe_handle()
        if self._kept is not None:
            report["generate"] = {**self._kept.generator.describe(), **self._frontend}
        return report

    # --- requests ---------------------------------------------------------------------------------------------

    def _responses(self, requests: Sequence[Request]) -> list[Response]:
        """Answers requests of a call together in the engine; envelopes know neither streams nor OpenAI's endpoints."""
        if requests[0].envelope is not None:
            return super()._responses(requests)
        calls = [self._call_for(request) for request in requests]
        self._openvino.counters.add("items", len(calls))
        try:
            self._finish(calls, requests)
            self._check_policy(calls)
        except Exception as error:
            # Pieces may be sent already: what is raised would end all streams without a word.
            fault = server_fault(error)
            for call in calls:
                call.fail(fault)
        return [self._response(request, call) for request, call in zip(requests, calls, strict=True)]

    def answer_items(self, items: list[Any]) -> list[Any]:
        """Returns the answer to each item, or its refusal."""
        return self.predict([self.decode(item) for item in items])

    def decode(self, item: Any) -> GenerationCall:
        """Starts what an item asks; a refusal is kept in what is returned."""
        # An envelope passes on the request itself, where TorchServe would give it a name.
        bare = isinstance(item, dict) and not item.keys() & {"data", "body"}
        return self._called({"body": item} if bare else item, "")

    def predict(self, values: list[GenerationCall]) -> list[Any]:
        """Generates until all are done, and returns their answers."""
        self._finish(values, ())
        return [call.whole() for call in values]

    def run_eager(self, value: Any) -> Any:
        """Is not called: the engine checks prompts before it takes them."""
        raise NotImplementedError

    def _finish(self, calls: Sequence[GenerationCall], requests: Sequence[Request]) -> None:
        """Generates until all are done; sends pieces of those that stream, and ends those whose client has hung up.

        Args:
            calls: What is generated.
            requests: The request of each; empty where a request holds several.
        """
        exchanges = [call.exchange for call in calls if call.exchange is not None]
        if self._measures is not None:
            self._measures.on_request()
        # Where nothing is generated, all of it is decoding.
        with MeasuredInference() if exchanges else nullcontext():
            try:
                while not all(call.done for call in calls):
                    wait_for_any(exchanges, _LOOK_SECONDS)
                    for request, call in zip(requests, calls, strict=False):
                        if not call.done and request.is_gone():
                            call.fail(BusyError("the client hung up"))
                        if call.streams and call.done:
                            # It need not wait for the others, but for the policy.
                            self._check_policy(calls)
                        if call.streams and (text := call.pieces()):
                            request.send(Response(text, EVENT_STREAM))
            finally:
                for exchange in exchanges:
                    exchange.cancel()
        if self._measures is not None and (metrics := self._openvino.metrics) is not None:
            for exchange in exchanges:
                self._measures.on_response(metrics, exchange)

    def _check_policy(self, calls: Sequence[GenerationCall]) -> None:
        """Refuses requests during which something fell back that the policy refuses; whose it was, no one can tell."""
        if self._openvino.state is None:
            return
        try:
            self._openvino.state.watch.check()
        except ForbiddenFallbackError as error:
            for call in calls:
                call.fail(error)

    # --- one request ------------------------------------------------------------------------------------------

    def _call_for(self, request: Request) -> GenerationCall:
        """Starts what a request asks, at the endpoint that its URL names."""
        if not request.explains:
            return self._called(request.row, request.path)
        call = GenerationCall()
        call.answer = NotExplainedError(NO_EXPLANATIONS)
        return call

    def _called(self, item: Any, path: str) -> GenerationCall:
        call = GenerationCall()
        assert self._reader is not None and self._kept is not None
        name = self._openvino.model_name
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
            continues = not getattr(self._openvino.eager_model.config, "is_encoder_decoder", False)
            call.exchange = ActiveRequest(
                request, self.engine, self._reader, continues=continues, special=self._special
            )
            call.bodies = FORMS[request.form](request, name, self._reader.text_of)
        except ItemError as error:
            call.answer = error
        except Exception as error:
            too_large = PayloadTooLargeError("this worker has not enough memory for this request")
            call.answer = too_large if is_out_of_memory(error) else server_fault(error)
        return call

    def _response(self, request: Request, call: GenerationCall) -> Response:
        """Returns the response in one piece, or the last piece of a stream."""
        worker = self._openvino
        if call.streams:
            text, error = call.pieces(), call.exchange.error if call.exchange is not None else None
            if error is not None and not request.is_gone():
                # Its events told the client; here it is counted and logged.
                finish([error], [request], worker.counters, None)
            return Response(text, EVENT_STREAM)
        form = openai_error if call.openai else None
        (response,) = finish([call.whole()], [request], worker.counters, worker.most_bytes, form)
        return replace(response, content_type=JSON)
