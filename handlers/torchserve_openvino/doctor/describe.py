"""Values as short text."""

import math
from typing import Any

import torch


def described(value: Any) -> str:
    """``float32[1, 3]`` for a tensor, the value itself for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)


def json_number(value: float) -> float | str:
    """The value, or its name where JSON has no such number: ``inf``, ``nan``."""
    return value if math.isfinite(value) else str(value)
