"""Models for the cache tests, and helpers that simulate a new process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.cache.storage.store import Store

X = torch.linspace(-2, 3, 12).reshape(2, 6)


class Net(nn.Module):
    """One partition."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Glued(nn.Module):
    """Two partitions around an operator that OpenVINO lacks, with weights in both."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.first(x))
        y = torch.digamma(x + 2)
        return {"y": torch.tanh(self.second(y)), "x": x * 3}


class Ids(nn.Module):
    """Takes integers, which OpenVINO computes in 32 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model_caching": True, "cache_dir": str(folder), **more}


def fresh(
    model: Callable[..., Any],
    folder: Path,
    *,
    dynamic: bool | None = False,
    own_weights: bool = False,
    cache: CacheSettings | None = None,
    frozen: bool = True,
    **more: Any,
) -> tov.CompiledModule:
    """Simulates a new process: nothing is compiled, only the folder is there."""
    torch.compiler.reset()
    compiled = compile_with(
        model,
        CompileSpec(
            dynamic=dynamic, options=options(folder, **more), own_weights=own_weights, cache=cache or CacheSettings()
        ),
    )
    return compiled.freeze() if frozen else compiled


def copied(value: Any) -> Any:
    # If a `torch.Size` were not a leaf, it would come back as a plain tuple.
    return pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf,
        value,
        is_leaf=lambda value: isinstance(value, torch.Size),
    )


def ask(compiled: tov.CompiledModule, *args: Any, eager: Any = None, **kwargs: Any) -> Any:
    """Makes one call and compares the result, its structure, and the inputs afterwards with eager."""
    given, twin = (args, kwargs), copied((args, kwargs))
    with torch.no_grad():
        expected = (eager or compiled.eager)(*twin[0], **twin[1])
        got = compiled(*args, **kwargs)
    assert type(got) is type(expected)
    assert_same(got, expected)
    assert_same(given, twin)
    return got


def cache_of(compiled: tov.CompiledModule) -> dict[str, Any]:
    return compiled.report.to_dict()["cache"]


def assert_hit(compiled: tov.CompiledModule, signatures: int = 1) -> None:
    """Asserts that nothing was traced or compiled."""
    cache = cache_of(compiled)
    assert cache["status"] == "hit", cache
    assert (cache["traces"], cache["compiles"], cache["stored"]) == (0, 0, 0), cache
    assert cache["calls"] == {"hits": signatures, "misses": 0} and not cache["refused"], cache
    assert cache["verified"] == {"against": "eager", "signatures": signatures, "rejected": 0}, cache


def assert_traced(compiled: tov.CompiledModule, signatures: int = 1) -> None:
    """Asserts that no call came from the cache, and that no cached result was rejected."""
    cache = cache_of(compiled)
    assert cache["calls"]["hits"] == 0 and cache["traces"] >= 1, cache
    assert cache["verified"]["rejected"] == 0, cache


def entries(folder: Path, *kinds: str) -> list[Any]:
    return sorted(Store(folder).entries(kinds or ("call", "partition", "blob")), key=lambda e: (e.kind, e.key))


def both(make: Callable[[], Any], folder: Path, *args: Any, **kwargs: Any) -> None:
    """Runs cold, then warm, with three calls each."""
    for process in range(2):
        compiled = fresh(make(), folder)
        for _ in range(3):
            ask(compiled, *args, eager=make(), **kwargs)
        if process:
            assert_hit(compiled)


def differs(first: Any, second: Any, folder: Path, *args: Any, **kwargs: Any) -> None:
    """Runs two models in turn in one folder: each gets its own result, and no entry is tried for the other model."""
    for model in (first, second):
        compiled = fresh(copy.deepcopy(model), folder)
        ask(compiled, *args, **kwargs)
        assert_traced(compiled)
    for model in (first, second):
        compiled = fresh(copy.deepcopy(model), folder)
        ask(compiled, *args, **kwargs)
        assert_hit(compiled)
