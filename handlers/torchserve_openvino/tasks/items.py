"""The common base of the shipped tasks: items are decoded separately, and a bad one does not affect the others."""

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

    # The model of a shipped task is not changed after loading.
    freezes = True
    # Whether `decode` is thread-safe and benefits from threads.
    decodes_in_parallel = False

    @abstractmethod
    def decode(self, item: Any) -> Any:
        """Decodes one request item to a value.

        Raises:
            ItemError: The item is invalid; its sender gets the message, with the error's HTTP status.
        """

    def together(self, values: list[Any], context: Any) -> list[Any]:
        """Does what is faster for all decoded items of a batch at once; an item may become an `ItemError`."""
        return values

    @abstractmethod
    def predict(self, values: list[Any]) -> list[Any]:
        """Computes the answers to values, in the same order; an answer may be an `ItemError`."""

    @abstractmethod
    def run_eager(self, value: Any) -> Any:
        """Runs the eager model on one value, to see whether the model accepts it."""

    def answer_items(self, items: list[Any], context: Any) -> list[Any]:
        """Returns an answer or an `ItemError` for each item."""
        start = time.perf_counter()
        answers: list[Any] = [None] * len(items)
        decoded: dict[int, Any] = {}
        for position, value in enumerate(self._decoders.run([partial(self._decoded, item) for item in items])):
            decoded[position] = value
        good = [position for position, value in decoded.items() if not isinstance(value, ItemError)]
        decoded |= zip(good, self._together([decoded[position] for position in good], context), strict=True)
        for position, value in list(decoded.items()):
            if isinstance(value, ItemError):
                answers[position] = decoded.pop(position)
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
            # The failed allocation took no memory from the other items.
            return PayloadTooLargeError("this worker has not enough memory for this item")
        except Exception as error:
            return server_fault(error)

    @cached_property
    def _decoders(self) -> Streams:
        """The threads for decoding: as many as OpenVINO has if items are decoded in parallel, else one."""
        threads = self.report.to_dict()["config"].get("threads", {}).get("openvino_threads")
        return Streams((threads or 1) if self.decodes_in_parallel else 1)

    def _together(self, values: list[Any], context: Any) -> list[Any]:
        """Runs `together`; after a failure for each item by itself, so that one cannot fail the others."""
        run = partial(self.together, context=context)
        return run_isolated(values, run, lambda _, error: server_fault(error), self.counters)

    def _predicted(self, values: list[Any]) -> list[Any]:
        return run_isolated(values, lambda some: self.watched(lambda: self.predict(some)), self._blame, self.counters)

    def _blame(self, value: Any, error: Exception) -> ItemError:
        """Blames the request, with eager's message, if eager PyTorch fails on the value as well; else the server."""
        if self.served is not None and self.served.released:
            # The eager model is gone; a value outside OpenVINO's range is the request's fault in any case.
            return InvalidInputError(str(error)) if isinstance(error, InexactValueError) else server_fault(error)
        try:
            # This run is no answer, so it is not counted as work outside the compiled graphs.
            with torch.inference_mode(), outside.compiled():
                self.run_eager(value)
        except Exception as refusal:
            text = (str(refusal).strip().splitlines() or [type(refusal).__name__])[0]
            return InvalidInputError(f"the model does not take this input: {text}")
        return server_fault(error)

    def check_finite(self, tensors: list[torch.Tensor]) -> None:
        """Checks that one item's outputs are finite.

        Raises:
            NonFiniteOutputError: An output holds NaN or infinity, and ``outputs.non_finite`` is ``refuse``.
        """
        if self.config.openvino.outputs.non_finite == "allow":
            return
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
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
    raise InvalidInputError("the request has no body; send the input as body, or as the form field 'data'")
