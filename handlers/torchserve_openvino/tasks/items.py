"""What the shipped tasks share: each item is decoded by itself, and a bad one answers for itself alone."""

import time
from abc import abstractmethod
from functools import cached_property, partial
from typing import Any

import torch

from torchserve_openvino.errors import (
    InexactValueError,
    InvalidInputError,
    ItemError,
    NonFiniteOutputError,
    PayloadTooLargeError,
)  # fmt: skip
from torchserve_openvino.serving.handler import OpenVINOHandler
from torchserve_openvino.serving.observation import outside
from torchserve_openvino.serving.requests.isolation import run_isolated, server_fault
from torchserve_openvino.serving.requests.streams import Streams


class ItemHandler(OpenVINOHandler):
    """A task: `decode` turns one request item into a value, `predict` a list of values into a list of answers."""

    # Nobody changes the model of a shipped task after loading.
    freezes = True
    # Whether `decode` gains by threads, and is safe in them.
    decodes_in_parallel = False

    @abstractmethod
    def decode(self, item: Any) -> Any:
        """One request item to a value.

        Raises:
            ItemError: The item is bad; the message goes to its sender, with the error's HTTP status.
        """

    @abstractmethod
    def predict(self, values: list[Any]) -> list[Any]:
        """Values to answers, in the same order; an answer may be an `ItemError`."""

    @abstractmethod
    def run_eager(self, value: Any) -> Any:
        """Runs the eager model on one value, to see whether it takes it."""

    def answer_items(self, items: list[Any], context: Any) -> list[Any]:
        """An answer or an `ItemError` for each item."""
        start = time.perf_counter()
        answers: list[Any] = [None] * len(items)
        decoded: dict[int, Any] = {}
        for position, value in enumerate(self._decoders.run([partial(self._decoded, item) for item in items])):
            if isinstance(value, ItemError):
                answers[position] = value
            else:
                decoded[position] = value
        if decoded:
            for position, answer in zip(decoded, self._predicted(list(decoded.values())), strict=True):
                answers[position] = answer
        milliseconds = (time.perf_counter() - start) * 1e3
        context.metrics.add_time("HandlerTime", round(milliseconds, 2), None, "ms", dimensions=[])
        return answers

    def _decoded(self, item: Any) -> Any:
        try:
            return self.decode(item)
        except ItemError as error:
            return error
        except MemoryError:
            # What one item would have taken is not missing to the others.
            return PayloadTooLargeError("this worker has not enough memory for this item")
        except Exception as error:
            return server_fault(error)

    @cached_property
    def _decoders(self) -> Streams:
        """As many as OpenVINO has threads, where decoding leaves Python's lock."""
        threads = self.report.to_dict()["config"].get("threads", {}).get("openvino_threads")
        return Streams((threads or 1) if self.decodes_in_parallel else 1)

    def _predicted(self, values: list[Any]) -> list[Any]:
        return run_isolated(values, lambda some: self.watched(lambda: self.predict(some)), self._blame, self.counters)

    def _blame(self, value: Any, error: Exception) -> ItemError:
        """Whether eager refuses the value as well: then it is the request's fault, and its message says why."""
        if self.served is not None and self.served.released:
            # There is no eager model any more; a value out of range is known to be the request's without it.
            return InvalidInputError(str(error)) if isinstance(error, InexactValueError) else server_fault(error)
        try:
            # No answer comes of it: it is not counted as one.
            with torch.inference_mode(), outside.compiled():
                self.run_eager(value)
        except Exception as refusal:
            text = (str(refusal).strip().splitlines() or [type(refusal).__name__])[0]
            return InvalidInputError(f"the model does not take this input: {text}")
        return server_fault(error)

    def check_finite(self, tensors: list[torch.Tensor]) -> None:
        """Looks at one item's outputs.

        Raises:
            NonFiniteOutputError: One holds NaN or infinity, and ``outputs.non_finite`` is ``refuse``.
        """
        if self.config.openvino.outputs.non_finite == "allow":
            return
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NonFiniteOutputError(f"output {index} holds NaN or infinity for this input")


def body(item: Any) -> Any:
    """What a request sent: its ``data`` or ``body``, or the item itself where an envelope opened it.

    Raises:
        InvalidInputError: Neither is there, or it is empty.
    """
    if not isinstance(item, dict):
        return item
    for name in ("data", "body"):
        value = item.get(name)
        if value is not None and not (isinstance(value, (bytes, bytearray, str, list)) and len(value) == 0):
            return value
    raise InvalidInputError("the request has no body; send the input as body, or as the form field 'data'")
