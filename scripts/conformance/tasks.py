"""What a worker can be asked for, as plain data."""

import functools
from typing import Any

import torch

from conformance import cases, core
from conformance.outcome import Outcome
from conformance.run_case import run_calls


def op_task(name: str, dtype: str, samples: int, extremes: bool = False, mode: str = "static") -> dict[str, Any]:
    """An operator of op_db in one dtype and mode, perhaps with extreme values among those of torch's samples."""
    return {"kind": "op", "name": name, "dtype": dtype, "samples": samples, "extremes": extremes, "mode": mode}


def core_task(name: str, recorded: str) -> dict[str, Any]:
    """A core ATen overload, with the file of recorded samples."""
    return {"kind": "core", "name": name, "recorded": recorded}


def run(task: dict[str, Any]) -> Outcome:
    """Runs one task."""
    if task["kind"] == "core":
        return core.run(task["name"], _recorded(task["recorded"]).get(task["name"], []))
    name = task["name"]
    calls = cases.calls_of(name, task["dtype"], task["samples"], task["extremes"])
    base = name.split(".")[0] if name.split(".")[0] in cases.UNINITIALISED else name
    settle = functools.partial(cases.settled, name)
    return run_calls(cases.function_of(name), calls, base not in cases.UNINITIALISED, settle, task["mode"])


@functools.lru_cache(maxsize=1)
def _recorded(path: str) -> dict[str, list[cases.Call]]:
    return torch.load(path, weights_only=False) if path else {}
