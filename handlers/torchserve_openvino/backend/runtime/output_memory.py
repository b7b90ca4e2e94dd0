"""Torch's memory as OpenVINO sees it, and the memory that results are written to.

Results are written to torch's memory where an OpenVINO kernel is sure to write it.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.spec import ValueSpec

_ARRAY_TYPES = {
    dtype: np.dtype(name)
    for dtype, name in {
        torch.float32: "float32",
        torch.float16: "float16",
        # NumPy has no bfloat16: any type of its size will do.
        torch.bfloat16: "float16",
        torch.int64: "int64",
        torch.int32: "int32",
        torch.int16: "int16",
        torch.uint8: "uint8",
        torch.int8: "int8",
        torch.bool: "bool",
    }.items()
}


class _Memory(ctypes.c_char * (1 << 62)):  # type: ignore[misc]
    """Memory from some address on, without an end. Nothing is allocated; one type serves all sizes.

    Attributes:
        owner: Whatever keeps the memory alive.
    """

    __slots__ = ("owner",)
    owner: torch.Tensor


def array_over(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Returns an array over the memory of a contiguous tensor, which it keeps alive.

    Unlike `Tensor.numpy`, this leaves the tensor's storage resizable, which torch forbids for good once an array was
    made: neither results nor the caller's inputs could be resized or passed as ``out=`` any more. As long as a call
    runs, the caller must not resize them.
    """
    memory = _Memory.from_address(tensor.data_ptr())
    memory.owner = tensor
    return np.ndarray(tensor.shape, _ARRAY_TYPES[tensor.dtype], memory)


class OutputMemory:
    """Allocates the memory that results are written to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Contexts of `poison` that last.
        self._poisoning = 0

    @property
    def poisoned(self) -> bool:
        """Whether the memory is filled with NaN (integers: a large negative number) before an inference.

        A comparison of results then reveals memory that was not written.
        """
        return self._poisoning > 0

    @contextmanager
    def poison(self) -> Iterator[None]:
        """Poisons the memory while the context lasts, for all threads."""
        with self._lock:
            self._poisoning += 1
        try:
            yield
        finally:
            with self._lock:
                self._poisoning -= 1

    def new(self, spec: ValueSpec) -> torch.Tensor:
        """Allocates memory for one result of a known shape."""
        return self.prepared(torch.empty(spec.shape, dtype=spec.dtype))

    def prepared(self, result: torch.Tensor) -> torch.Tensor:
        """Returns memory for a result, poisoned where that is asked for."""
        return _poison(result) if self.poisoned else result


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.dtype
    if kind.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if kind is torch.bool else tensor.fill_(torch.iinfo(kind).min // 3)


def poison_array(array: "np.ndarray[Any, Any]") -> None:
    """Fills OpenVINO's own memory in the same way."""
    kind = array.dtype
    array[...] = True if kind == np.bool_ else np.iinfo(kind).min // 3 if kind.kind in "iu" else np.nan


# Layers whose output may share the memory of their input in the CPU plugin, so that a chain of them writes nothing.
_IN_PLACE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Split"})
_GIVEN = frozenset({"Input", "Const"})


def computed_outputs(compiled: ov.CompiledModel) -> list[bool] | None:
    """Checks for each output whether a kernel computes it, and so writes it to whatever memory it is given.

    No kernel writes an output that is an input or a constant: OpenVINO then uses the memory given for that output as
    the input itself, and computes everything from what happens to be there. The names are those of the executed
    graph: https://docs.openvino.ai, "execution graph", ``layerType``.

    Returns:
        One flag per output; None if the device does not expose its executed graph.
    """
    try:
        results = compiled.get_runtime_model().get_results()
    except RuntimeError:
        # AUTO, MULTI and others have none.
        return None
    return [_is_computed(result.input_value(0).get_node()) for result in results]


def _is_computed(node: ov.Node) -> bool:
    while (kind := _layer_type(node)) in _IN_PLACE or (kind == "Concatenation" and len(node.inputs()) == 1):
        node = node.input_value(0).get_node()
    return bool(kind) and kind not in _GIVEN


def _layer_type(node: ov.Node) -> str:
    info = node.get_rt_info()
    if "layerType" not in info:
        return ""
    value = info["layerType"]
    return str(getattr(value, "value", value))
