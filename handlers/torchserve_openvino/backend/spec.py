"""What crosses the border between torch and OpenVINO: types, shapes and memory layout of one input or output."""

from dataclasses import dataclass
from typing import Any

import openvino as ov
import torch

OV_TYPES: dict[torch.dtype, ov.Type] = {
    torch.float32: ov.Type.f32,
    torch.float16: ov.Type.f16,
    torch.bfloat16: ov.Type.bf16,
    torch.int64: ov.Type.i64,
    torch.int32: ov.Type.i32,
    torch.uint8: ov.Type.u8,
    torch.int8: ov.Type.i8,
    torch.bool: ov.Type.boolean,
}


@dataclass(frozen=True)
class ValueSpec:
    """One input or output of a partition.

    Attributes:
        dtype: Element type; int64 for an integer that torch passes as SymInt.
        shape: -1 where a dimension is symbolic.
        is_scalar_int: A SymInt, crossing as a 0-d int64 tensor.
        layout: Order of dimensions from outermost to innermost in eager's memory, None where it is contiguous:
            answers keep eager's strides.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_scalar_int: bool = False
    layout: tuple[int, ...] | None = None

    @property
    def is_static(self) -> bool:
        """Whether every dimension is known."""
        return -1 not in self.shape

    @property
    def ov_type(self) -> ov.Type:
        """OpenVINO's name of the element type."""
        return OV_TYPES[self.dtype]


def _layout(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in memory where the tensor is dense but not contiguous."""
    if tensor.dim() < 2 or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    if any(not isinstance(value, int) for value in (*strides, *tensor.shape)):
        # A symbolic stride has no order to sort by; the hint of the example decides.
        strides = tuple(_hint(value) for value in strides)
    order = tuple(sorted(range(tensor.dim()), key=lambda i: (-strides[i], i)))
    dense = tensor.permute(order).is_contiguous()
    return order if dense and order != tuple(range(tensor.dim())) else None


def _hint(value: Any) -> int:
    return value if isinstance(value, int) else int(value.node.hint or 0)


def spec_of(value: Any) -> ValueSpec:
    """Describes a fake value of the traced graph.

    Raises:
        TypeError: Neither a tensor nor an integer.
    """
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
        return ValueSpec(value.dtype, shape, layout=_layout(value))
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return ValueSpec(torch.int64, (), is_scalar_int=True)
    raise TypeError(f"{type(value).__name__} can't cross between torch and OpenVINO")
