"""OpenAI's endpoints for speech: forms with a file in; JSON, text or subtitles out."""

import html
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.generation.speech.recordings import Segment, Transcript
from torchserve_openvino.tasks.openai import RequestError, unknown_path
from torchserve_openvino.tasks.request_body import parameters_of
from torchserve_openvino.tasks.speech.speech_parameters import TIMED, OpenAIAudio

# What follows model and version in the URL.
TRANSCRIPTIONS, TRANSLATIONS = "v1/audio/transcriptions", "v1/audio/translations"
_TASKS = {TRANSCRIPTIONS: "transcribe", TRANSLATIONS: "translate"}
_FILE = "file"


@dataclass(frozen=True)
class AnswerForm:
    """The form in which an answer goes out.

    Attributes:
        name: OpenAI's name of it.
        task: ``transcribe`` or ``translate``.
        temperature: The temperature that was asked for.
    """

    name: str
    task: str
    temperature: float


def read(item: Any, path: str) -> tuple[dict[str, Any], AnswerForm]:
    """Reads a request.

    Args:
        item: The form's fields, as TorchServe passes them: files as bytes.
        path: What follows model and version in the URL.

    Returns:
        The same request in Hugging Face's form, and the form of its answer.

    Raises:
        InvalidInputError: It is no such request; the message names the field.
    """
    if path not in _TASKS:
        raise unknown_path(path, f"{TRANSCRIPTIONS}, {TRANSLATIONS}, and the model itself")
    if not isinstance(item, Mapping) or _FILE not in item:
        raise RequestError("send a form (multipart/form-data) with the recording as the field file", param=_FILE)
    file = item[_FILE]
    if not isinstance(file, (bytes, bytearray)):
        raise RequestError("the field file must be a recording (WAV, FLAC, ...), not text", param=_FILE)
    fields = {name.removesuffix("[]"): _text(name, value) for name, value in item.items() if name != _FILE}
    audio = parameters_of(OpenAIAudio, fields)
    task, name = _TASKS[path], audio.response_format
    parameters = {
        "language": audio.language or None, "prompt": audio.prompt or None, "temperature": audio.temperature,
        "task": task, "return_timestamps": name in TIMED or None,
    }  # fmt: skip
    settings = {key: value for key, value in parameters.items() if value is not None}
    return {"body": {"inputs": bytes(file), "parameters": settings}}, AnswerForm(name, task, audio.temperature)


def _text(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, (bytes, bytearray)) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the field {name} is not UTF-8 text: {error}") from error


def body(transcripts: Transcript, form: AnswerForm) -> tuple[Any, str]:
    """Returns the body of an answer, and its content type."""
    if form.name == "json":
        return {"text": transcripts.text}, "application/json"
    if form.name == "verbose_json":
        return _verbose(transcripts, form), "application/json"
    if form.name == "srt":
        return _subtitles(_said(transcripts), ",", ""), _PLAIN
    if form.name == "vtt":
        return _subtitles(_said(transcripts), ".", "WEBVTT\n\n"), "text/vtt; charset=utf-8"
    return transcripts.text + "\n", _PLAIN


# Without a charset, some clients read Latin 1.
_PLAIN = "text/plain; charset=utf-8"


def _said(transcripts: Transcript) -> list[Segment]:
    """Returns the segments that say something."""
    return [segment for segment in transcripts.segments if segment.text.strip()]


def _verbose(transcripts: Transcript, form: AnswerForm) -> dict[str, Any]:
    segments = [
        {
            "id": number,
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": list(segment.tokens),
            "temperature": form.temperature,
            "compression_ratio": _compression(segment.text),
        }
        for number, segment in enumerate(_said(transcripts))
    ]
    # A translation is in English, whatever was spoken.
    language = "english" if form.task == "translate" else transcripts.language
    return {
        "task": form.task,
        "language": language,
        "duration": round(transcripts.seconds, 3),
        "text": transcripts.text,
        "segments": segments,
    }


def _compression(text: str) -> float:
    """Returns how much smaller a text becomes by zlib: high where it repeats itself."""
    data = text.encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data))


def _subtitles(segments: Sequence[Segment], point: str, head: str) -> str:
    """Returns SubRip or WebVTT."""
    numbered = not head
    # WebVTT has tags; the arrow is between times in both.
    written: Callable[[str], str] = partial(html.escape, quote=False) if not numbered else _without_arrow
    cues = [
        (f"{number}\n" if numbered else "")
        + f"{_time(segment.start, point)} --> {_time(segment.end, point)}\n"
        + f"{written(segment.text.strip())}\n\n"
        for number, segment in enumerate(segments, 1)
    ]
    return head + "".join(cues)


def _without_arrow(text: str) -> str:
    return re.sub("-{2,}>", "->", text)


def _time(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"
