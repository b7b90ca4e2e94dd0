"""Writes down what is said in a recording, with Whisper: token by token, window by window."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError, VerificationError
from torchserve_openvino.generation.graph_calls import compile_parts
from torchserve_openvino.generation.speech.recordings import Sound, Transcript, TranscriptionSettings
from torchserve_openvino.generation.speech.speech_model import SpeechModel
from torchserve_openvino.generation.speech.speech_proof import made_up, prove
from torchserve_openvino.generation.speech.whisper_decoder import WhisperDecoder
from torchserve_openvino.generation.text.generation_proof import GenerationProof
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.policy import admit
from torchserve_openvino.serving.requests.batch_answer import AnswerList
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.shapes.plan import batch_sizes
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.audio.audio_handler import RecordingHandler
from torchserve_openvino.tasks.audio.sound import RecordingLimits, samples_of
from torchserve_openvino.tasks.hub_handler import RequestInput
from torchserve_openvino.tasks.openai import openai_error
from torchserve_openvino.tasks.request_body import RequestBody
from torchserve_openvino.tasks.speech import endpoints
from torchserve_openvino.tasks.speech.speech_parameters import SpeechParameters, Spoken, flattened

logger = logging.getLogger(__name__)

# The longest recording where the YAML does not say; docs/configuration.md states it.
_MAX_SECONDS = 600.0
# One window of the spectrogram.
_SHORTEST_SECONDS = 0.025


@dataclass(frozen=True)
class TranscriptionRequest:
    """A recording, and how it is transcribed."""

    sound: Sound
    settings: TranscriptionSettings


class Transcriber(RecordingHandler):
    """The text of a recording, by Whisper.

    Recordings longer than the model's window are transcribed window by window, as transformers' ``generate`` does:
    each begins where the last complete segment ended.

    Attributes:
        listener: The model with its feature extractor and tokenizer.
        allowed: The largest recording.
        batches: How many recordings run together: the compiled batch sizes.
    """

    task = "speech_recognizer"
    parameters = SpeechParameters
    answers = Spoken

    # Not in `__init__`: a handler becomes one after it was made (`SpeechRecognizer`).
    listener: Any = None
    allowed = RecordingLimits(0.0, 0)
    batches: tuple[int, ...] = (1,)
    _eager: Any = None
    _proof: GenerationProof | None = None

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> nn.Module:
        """Loads model, feature extractor and tokenizer.

        Raises:
            ModelLoadError: It is no Whisper model, its files do not fit together, or a setting has no use here.
        """
        self._check_section()
        model: Any = hub.load_model(folder, self.about.encoder_loader)
        if type(model).__name__ != "WhisperForConditionalGeneration":
            raise ModelLoadError(
                f"{type(model).__name__} writes text token by token; of such models, Whisper is served "
                "(WhisperForConditionalGeneration)."
            )
        # Checkpoints in 16 bits are served in 32.
        model = model.float()
        self._eager = SpeechModel(model, hub.load_feature_extractor(folder), hub.load_tokenizer(folder, fast=False))
        self.listener = self._eager
        audio = self._openvino.config.openvino.audio
        longest = audio.max_seconds if audio.max_seconds is not None else _MAX_SECONDS
        self.allowed = RecordingLimits(longest, audio.max_bytes)
        if not self._eager.timed and self._eager.window < longest:
            self.allowed = RecordingLimits(
                self._eager.window, audio.max_bytes, "the model's window: it writes no times to go on by"
            )
        return model

    def _check_section(self) -> None:
        """Refuses settings that would have no effect here."""
        section = self._openvino.config.openvino
        for key, is_set in {
            "warmup.inputs": bool(section.warmup.inputs),
            "warmup.samples": bool(section.warmup.samples),
            "batching.dims": bool(section.batching.dims),
            "compile": bool(section.compile),
            "release_weights": section.release_weights,
            "audio.lengths": section.audio.lengths != "auto",
            "verify.shadow": bool(section.verify.shadow),
        }.items():
            if is_set:
                raise ModelLoadError(
                    f"handler.openvino.{key} has no use for Whisper, whose graphs and windows of sound are known. "
                    "Remove it."
                )

    def _prepare(self, context: WorkerContext) -> Models | None:
        """Compiles and verifies encoder and decoder, and compares what they write with eager PyTorch."""
        threads = context.threads
        if not context.config.pt2.enabled:
            self.batches = (context.batch_size,)
            return super()._prepare(context)
        # Imported here: it imports transformers.
        from torchserve_openvino.generation.speech.stand_in import stand_in

        self.batches = tuple(sorted(batch_sizes(context.config.openvino, context.batch_size, threads.streams)))
        pieces = WhisperDecoder(self.model, self.batches)
        models = compile_parts(pieces.parts(), context)
        models.loops = True
        self._openvino.report = self._own_code.report = models.report
        self.listener = self._eager.like(stand_in(self.model, pieces), pieces.forget)
        self._prove(threads.settle if models.needs_no_torch else lambda: None)
        admit(self._openvino.report, self._openvino.config.openvino.fallback)
        return models

    def _prove(self, between: Callable[[], object]) -> None:
        """Compares what the compiled pieces write with eager PyTorch.

        Args:
            between: Called once eager PyTorch has nothing left to do.

        Raises:
            VerificationError: It differs, and ``verify.on_violation`` is ``refuse``.
        """
        section = self._openvino.config.openvino
        if section.verify.against == "off":
            return
        start = time.perf_counter()
        recorded = made_up(
            self.listener.rate, self.listener.window, self.listener.extract, timed=self.listener.timed,
            together=self.batches[-1] > 1,
        )  # fmt: skip
        tokens = min(section.generate.proof_tokens, self.listener.most_tokens)
        precision = self._openvino.report.summary.precision or "f32"
        proof = prove(
            self._eager.model, self.listener.model, recorded, tokens, [precision], section.verify, between=between
        )
        self._proof = proof
        tracker = self._openvino.report.tracker
        tracker.add_timing("proof_seconds", time.perf_counter() - start)
        if proof.passed:
            return
        message = f"what is written differs from eager PyTorch: {'; '.join(proof.problems)}."
        if section.verify.on_violation == "refuse":
            raise VerificationError(message)
        logger.warning("%s", message)
        tracker.add_note(message)

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, with how the written tokens compare with eager PyTorch's, and what requests may ask."""
        report = super().describe_handle()
        if self.listener is None:
            return report
        limits = {
            "max_seconds": self.allowed.seconds, "window_seconds": self.listener.window,
            "timestamps": self.listener.timed, "tasks": list(self.listener.tasks),
            "languages": sorted(name[2:-2] for name in self.listener.languages), "batches": list(self.batches),
        }  # fmt: skip
        proof = self._proof.to_dict() if self._proof is not None else {"tokens_compared": 0, "passed": None}
        engine = "compile" if self._openvino.config.pt2.enabled else "eager"
        return {
            **report,
            "task": {**report["task"], "limits": limits},
            "generate": {"engine": engine, **proof},
        }

    # --- requests ---------------------------------------------------------------------------------------------

    def ask(self, value: Any, max_bytes: int, max_inputs: int) -> RequestBody:
        """Reads what one request asks."""
        request = super().ask(value, max_bytes, max_inputs)
        return RequestBody(request.inputs, flattened(request.parameters), request.many)

    def characters(self, part: RequestInput) -> int:
        """Returns how many characters of the prompt the tokenizer reads."""
        return len(part.parameters.prompt or "")

    def decode(self, item: RequestInput) -> TranscriptionRequest:
        """Decodes one recording, and extracts its spectrogram."""
        settings = self._settings(item.parameters)
        samples = samples_of(item.input, self.listener.rate, self.allowed)
        least = int(_SHORTEST_SECONDS * self.listener.rate)
        if len(samples) < least:
            raise InvalidInputError(
                f"the recording has {len(samples)} samples at {self.listener.rate} Hz; this model needs {least}"
            )
        sound = self.listener.sound(samples)
        self.listener.check(settings, sound)
        return TranscriptionRequest(sound, settings)

    def _settings(self, parameters: SpeechParameters) -> TranscriptionSettings:
        listener = self.listener
        return TranscriptionSettings(
            language=listener.language(parameters.language) if parameters.language is not None else None,
            task=listener.task(parameters.task) if parameters.task is not None else None,
            timestamps=bool(parameters.return_timestamps) or listener.timed_always,
            max_new_tokens=parameters.max_new_tokens,
            num_beams=parameters.num_beams,
            temperature=parameters.temperature,
            prompt=listener.prompt(parameters.prompt) if parameters.prompt else (),
        )

    def predict(self, values: list[TranscriptionRequest]) -> list[Any]:
        """Transcribes recordings that may be transcribed together, group by group."""
        answers: list[Any] = [None] * len(values)
        for group in self.listener.groups([(value.sound, value.settings) for value in values], self.batches[-1]):
            sounds = [values[position].sound for position in group]
            transcripts = self.listener.transcribe(sounds, values[group[0]].settings)
            for position, answer in zip(group, transcripts, strict=True):
                answers[position] = answer
        return answers

    def run_eager(self, value: TranscriptionRequest) -> Any:
        """Transcribes one recording in eager PyTorch."""
        return self._eager.transcribe([value.sound], value.settings)

    def _answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        """Answers a batch: requests in OpenAI's form are transcribed together with others."""
        answers: list[Any] = [None] * len(items)
        forms: dict[int, endpoints.AnswerForm | None] = {}
        parameters: dict[int, Any] = {}
        for index, (item, request) in enumerate(zip(items, requests, strict=True)):
            if request.envelope is not None or not request.path:
                parameters[index] = item
                continue
            try:
                parameters[index], forms[index] = endpoints.read(item, request.path)
            except ItemError as error:
                answers[index], forms[index] = error, None
        if parameters:
            # Those in OpenAI's form are in the task's own by now.
            own = [requests[index].without_path() if index in forms else requests[index] for index in parameters]
            transcripts = super()._answered(list(parameters.values()), own)
            for index, answer in zip(parameters, transcripts, strict=True):
                answers[index] = answer
        return [
            _in_form(answer, forms[index]) if index in forms else _plain(answer) for index, answer in enumerate(answers)
        ]


def _in_form(answer: Any, form: endpoints.AnswerForm | None) -> Any:
    """Returns an answer or a refusal in OpenAI's form."""
    if isinstance(answer, ItemError):
        answer.form = openai_error
        return answer
    assert form is not None
    return Response(*endpoints.body(answer, form))


def _plain(answer: Any) -> Any:
    """Returns an answer in Hugging Face's form."""
    if isinstance(answer, AnswerList):
        return AnswerList(map(_plain, answer))
    if not isinstance(answer, Transcript):
        return answer
    return {"text": answer.text} if answer.chunks is None else {"text": answer.text, "chunks": answer.chunks}
