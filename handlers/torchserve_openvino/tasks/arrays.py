"""Answers with arrays of numbers in them, written as JSON without a Python object for each number."""

from typing import Any

import orjson
import torch
from torch.utils._pytree import tree_leaves

from torchserve_openvino.serving.requests.batch_answer import SelfWritten

# TorchServe indents its answers by two spaces, too.
_LIKE_TORCHSERVE = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
# A digit and what separates it from the next number.
_LEAST_BYTES = 2


class Arrays(SelfWritten):
    """An answer in which float32 or float64 tensors may stand where lists of numbers are sent.

    For 224 x 224 pixels with two numbers each, TorchServe's way, `tolist` and Python's `json.dumps` with indentation,
    takes 180 ms, and this one 5 ms.

    Attributes:
        value: Plain JSON data, or tensors, or both.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def least_bytes(self) -> int:
        """Returns the bytes that the numbers of its tensors take at least."""
        return _LEAST_BYTES * sum(leaf.numel() for leaf in tree_leaves(self.value) if isinstance(leaf, torch.Tensor))

    def plain(self) -> Any:
        """Returns the answer as plain JSON data."""
        return orjson.loads(self.written())

    def written(self) -> bytes:
        """Returns the answer as JSON; each number is the one that `torch.Tensor.tolist` gives."""
        return orjson.dumps(self.value, _numbers, _LIKE_TORCHSERVE)


def _numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(value).__name__} is no JSON")
    # As float32, numbers would have fewer digits than TorchServe sends.
    return value.double().contiguous().numpy()
