"""Tasks for a worker, as plain data."""

import functools
from typing import Any

import torch

from conformance import cases, core
from conformance.followed import followed
from conformance.outcome import Outcome
from conformance.real_sizes import real_calls
from conformance.run_case import run_calls


def op_task(
    name: str, dtype: str, samples: int, extremes: bool = False, mode: str = "static", followed: bool = False
) -> dict[str, Any]:
    """An operator of op_db in one dtype and mode.

    Args:
        name: Name in op_db.
        dtype: One of `cases.COLUMNS`.
        samples: Maximum number of samples.
        extremes: Whether to insert extreme values into torch's samples.
        mode: One of `run_case.MODES`.
        followed: Whether arithmetic follows the operator; see `followed.py`.
    """
    return {"kind": "op", "name": name, "dtype": dtype, "samples": samples, "extremes": extremes, "mode": mode,
            "followed": followed}  # fmt: skip


def core_task(name: str, recorded: str) -> dict[str, Any]:
    """A core ATen overload, with the file of recorded samples."""
    return {"kind": "core", "name": name, "recorded": recorded}


def run(task: dict[str, Any]) -> Outcome:
    """Runs one task."""
    if task["kind"] == "core":
        return core.run(task["name"], _recorded(task["recorded"]).get(task["name"], []))
    name = task["name"]
    if task["dtype"] == cases.REAL:
        calls = real_calls(name)
    else:
        calls = cases.calls_of(name, task["dtype"], task["samples"], task["extremes"])
    settle = functools.partial(cases.settled, name)
    function = cases.function_of(name)
    # Indices of tied values are compared by the values they select, which the arithmetic would change.
    if task["followed"] and name not in cases.TIES:
        function = followed(function)
    return run_calls(function, calls, name.split(".")[0] not in cases.UNINITIALIZED, settle, task["mode"])


@functools.lru_cache(maxsize=1)
def _recorded(path: str) -> dict[str, list[cases.Call]]:
    return torch.load(path, weights_only=False) if path else {}
