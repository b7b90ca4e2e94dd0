"""The memory that answers are written to: torch's, where a kernel of OpenVINO is sure to write it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.spec import ValueSpec


class OutputMemory:
    """Where answers are written to.

    Attributes:
        poisoned: Whether it holds NaN (integers: a large negative number) before an inference instead of whatever was
            there, so that a comparison of answers shows memory that nobody wrote to.
    """

    def __init__(self) -> None:
        self.poisoned = False

    @contextmanager
    def poison(self) -> Iterator[None]:
        """Poisons it for a while, for all threads."""
        before, self.poisoned = self.poisoned, True
        try:
            yield
        finally:
            self.poisoned = before

    def new(self, spec: ValueSpec) -> torch.Tensor:
        """Memory for one answer of a known shape."""
        result = torch.empty(spec.shape, dtype=spec.dtype)
        return _poison(result) if self.poisoned else result


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.dtype
    if kind.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if kind is torch.bool else tensor.fill_(torch.iinfo(kind).min // 3)


def poison_array(array: "np.ndarray[Any, Any]") -> None:
    """Fills memory of OpenVINO's own in the same way."""
    kind = array.dtype
    array[...] = True if kind == np.bool_ else np.iinfo(kind).min // 3 if kind.kind in "iu" else np.nan


# What the CPU plugin may lay out in the memory of its input, so that nothing is written at the end of such a chain.
_IN_PLACE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Split"})
_GIVEN = frozenset({"Input", "Const"})


def computed_outputs(compiled: ov.CompiledModel) -> list[bool] | None:
    """For each output whether a kernel computes it, and writes it wherever the memory lies.

    An output that is an input or a constant is nobody's to write: OpenVINO then takes the memory that it is given for
    that output for the input itself, and computes everything from what happens to lie there. The names are those of
    the executed graph: https://docs.openvino.ai, "execution graph", ``layerType``.

    Returns:
        None where the device shows no executed graph.
    """
    try:
        results = compiled.get_runtime_model().get_results()
    except RuntimeError:
        # AUTO, MULTI and others have none to show.
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
