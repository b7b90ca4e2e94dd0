"""Small pieces of OpenVINO graphs that several conversions need."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from openvino import Output
from openvino import opset15 as ops


def int64(values: int | Sequence[int]) -> Any:
    """A constant of one integer, or of a list of them."""
    return ops.constant(np.array(values, dtype=np.int64))


def static_shape(tensor: Output) -> list[int]:
    """The sizes of a tensor, all of which are known.

    Raises:
        RuntimeError: One is not.
    """
    return list(tensor.get_shape())
