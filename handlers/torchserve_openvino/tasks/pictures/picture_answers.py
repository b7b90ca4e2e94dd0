"""The forms in which pictures go out: PNG, JSON with base64, and server-sent events."""

import base64
import io
import json
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from torchserve_openvino.serving.requests.messages import EVENT_STREAM, Request, Response
from torchserve_openvino.serving.requests.response_body import check_length
from torchserve_openvino.tasks.forms import Answer

_EVENT = "image_generation"


class Made(Answer):
    """One picture."""

    b64_json: str
    """The picture: PNG in base64."""
    seed: int
    """Makes the same picture again."""


class Pictures(Answer):
    """The pictures of one request, as OpenAI answers them, with their seeds."""

    created: int
    """When, in seconds since 1970."""
    data: list[Made]
    """The pictures, in the order of their seeds."""


def png(picture: Image.Image, seed: int) -> bytes:
    """Encodes a picture, with its seed as a text in the file; equal pictures give equal bytes."""
    buffer, info = io.BytesIO(), PngInfo()
    info.add_text("seed", str(seed))
    picture.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def entry_of(data: bytes, seed: int) -> dict[str, Any]:
    """Returns the entry of one picture."""
    return {"b64_json": base64.b64encode(data).decode(), "seed": seed}


def together(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the answer with all pictures."""
    return {"created": int(time.time()), "data": list(entries)}


class PictureEvents:
    """Sends server-sent events to one request of a batch, before the batch is answered.

    Args:
        request: The request.
        most_bytes: The most that the host sends as one body; None if it has no limit.
    """

    def __init__(self, request: Request, most_bytes: int | None) -> None:
        self._request, self._most_bytes = request, most_bytes
        self.begun = False

    def progress(self, number: int, count: int, step: int, steps: int) -> None:
        """Tells that picture ``number`` of ``count``, from 1, has made ``step`` of ``steps``."""
        facts = {"picture": number, "pictures": count, "step": step, "steps": steps}
        self.send(event("progress", facts))

    def send(self, text: str) -> None:
        """Sends some events; the first one opens the stream.

        Raises:
            PayloadTooLargeError: They are longer than what the host sends.
        """
        self.check(text)
        self.begun = True
        self._request.send(Response(text, EVENT_STREAM))

    def check(self, text: str) -> str:
        """Returns the last events, which the handler itself returns, if the host sends as much.

        Raises:
            PayloadTooLargeError: They are longer.
        """
        check_length(len(text), self._most_bytes)
        return text


def event(kind: str, facts: dict[str, Any]) -> str:
    """Returns one server-sent event, of the type ``image_generation.KIND`` as OpenAI names them."""
    name = f"{_EVENT}.{kind}"
    return f"event: {name}\ndata: {json.dumps({'type': name, **facts})}\n\n"
