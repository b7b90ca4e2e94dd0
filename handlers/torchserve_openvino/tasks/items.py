"""What the shipped tasks share: each item is decoded by itself, and a bad one answers for itself alone."""

import logging
import time
from abc import abstractmethod
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.serving.handler import OpenVINOHandler

logger = logging.getLogger(__name__)


class ItemHandler(OpenVINOHandler):
    """A task: `decode` turns one request item into a value, `predict` a list of values into a list of answers."""

    # Nobody changes the model of a shipped task after loading.
    freezes = True

    @abstractmethod
    def decode(self, item: dict[str, Any]) -> Any:
        """One request item to a value.

        Raises:
            InvalidInputError: The item is bad; the message goes to its sender, with the error's HTTP status.
        """

    @abstractmethod
    def predict(self, values: list[Any]) -> list[Any]:
        """Values to answers, in the same order; an answer may be an `InvalidInputError`."""

    def answer(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answers each item, the bad ones with their own 4xx."""
        if self._is_describe():
            return [self.describe_handle()]
        start = time.perf_counter()
        decoded: dict[int, Any] = {}
        answers: list[Any] = [None] * len(data)
        for position, item in enumerate(data):
            try:
                decoded[position] = self.decode(item)
            except InvalidInputError as error:
                answers[position] = error
        if decoded:
            for position, answer in zip(decoded, self.predict(list(decoded.values())), strict=True):
                answers[position] = answer
        for position, answer in enumerate(answers):
            if isinstance(answer, InvalidInputError):
                answers[position] = _refuse(context, position, answer)
            elif isinstance(answer, bytes):
                context.set_response_content_type(position, "application/octet-stream")
        milliseconds = (time.perf_counter() - start) * 1e3
        context.metrics.add_time("HandlerTime", round(milliseconds, 2), None, "ms", dimensions=[])
        return answers


def body(item: dict[str, Any]) -> Any:
    """What a request sent: its ``data`` or ``body``.

    Raises:
        InvalidInputError: Neither is there, or it is empty.
    """
    for name in ("data", "body"):
        value = item.get(name)
        if value is not None and not (isinstance(value, (bytes, bytearray, str, list)) and len(value) == 0):
            return value
    raise InvalidInputError("the request has no body; send the input as body, or as the form field 'data'")


def _refuse(context: Any, position: int, error: InvalidInputError) -> dict[str, Any]:
    logger.info("Item %d was refused with %d: %s", position, error.status, error)
    context.set_response_status(error.status, HTTPStatus(error.status).phrase, position)
    context.set_response_content_type(position, "application/json")
    return {"code": error.status, "type": type(error).__name__, "message": str(error)}
