"""The memory that results are written to: torch's, where an OpenVINO kernel is sure to write it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.spec import ValueSpec


class OutputMemory:
    """Allocates the memory that results are written to.

    Attributes:
        poisoned: Whether the memory is filled with NaN (integers: a large negative number) before an inference, so that
            a comparison of results reveals memory that was not written.
    """

    def __init__(self) -> None:
        self.poisoned = False

    @contextmanager
    def poison(self) -> Iterator[None]:
        """Poisons the memory while the context lasts, for all threads."""
        before, self.poisoned = self.poisoned, True
        try:
            yield
        finally:
            self.poisoned = before

    def new(self, spec: ValueSpec) -> torch.Tensor:
        """Allocates memory for one result of a known shape."""
        result = torch.empty(spec.shape, dtype=spec.dtype)
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
    found = info["layerType"]
    return str(getattr(found, "value", found))
