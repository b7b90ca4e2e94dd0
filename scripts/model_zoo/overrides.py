"""What single architectures need to be small and to run, beyond the rules of `shrinking` and `inputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_zoo.grid import Case

# By the type of a configuration, or of a part: its arguments, or a function of the case that returns them.
FIELDS: dict[str, dict[str, Any] | Callable[[Case], dict[str, Any]]] = {
    "swin": lambda case: {"embed_dim": case.head, "num_heads": [1, 2], "depths": [2, 1]},
}

# By model type: draws its inputs from an `inputs.Draw`.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {}
# Model types that are not run, with the reason.
LEFT_OUT: dict[str, str] = {}
