"""Helpers for OpenVINO graphs that several conversions use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import Output, Type
from openvino import opset15 as ops


def int64(values: int | Sequence[int]) -> Any:
    """Returns an int64 constant of one integer, or of a list of them."""
    return ops.constant(np.array(values, dtype=np.int64))


def zero(kind: Type) -> Any:
    """Returns a constant 0 of a type; NumPy lacks bfloat16."""
    return ops.convert(ops.constant(np.float32(0)), kind)


def static_shape(tensor: Output) -> list[int]:
    """Returns the sizes of a tensor, all of which must be known.

    Raises:
        RuntimeError: A size is not known.
    """
    return list(tensor.get_shape())


def array_of(constant: Any) -> np.ndarray:
    """Returns the values of a Constant; those of bfloat16, which NumPy lacks, as float32.

    Its ``data`` would give the bits of bfloat16 as float16, other numbers (tests/contract/test_openvino.py).
    """
    if constant.get_element_type() == Type.bf16:
        return np.asarray(constant.get_data(dtype=np.float32))
    return np.asarray(constant.data)


def rank(tensor: Output) -> int:
    """Returns the number of dimensions of a tensor; its sizes need not be known."""
    return int(tensor.get_partial_shape().rank.get_length())


def exact_quotient(x: Output, y: Output) -> Any:
    """Returns the quotient of floats, rounded as in torch.

    OpenVINO's CPU plugin multiplies by the rounded reciprocal instead, except where its own mark forbids it
    (tests/contract/test_openvino.py).
    """
    quotient = ops.divide(x, y)
    quotient.get_rt_info()["nonconvertable_divide_0"] = True
    return quotient
