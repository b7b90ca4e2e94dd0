"""Formats values as short text."""

from typing import Any

import torch


def described(value: Any) -> str:
    """Formats a tensor, also one in a list, as ``float32[1, 3]``; anything else with ``repr``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)
