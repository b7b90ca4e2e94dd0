"""Sorting: on OpenVINO where that is not slower, which compares all pairs of values; else counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchserve_openvino as tov

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sort": lambda x: x.sort(-1),
    "stable sort": lambda x: torch.sort(x, stable=True, dim=-1, descending=True),
    "argsort": lambda x: x.argsort(-1),
    "median": lambda x: x.median(-1),
    "k-th value": lambda x: x.kthvalue(3, -1),
    "median of all": lambda x: x.median(),
    "many of the largest": lambda x: x.topk(x.shape[-1] // 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("rows", "size", "coverage"), [(2, 100, 1.0), (4, 16384, 0.0)])
def test_what_is_slower_on_openvino_runs_in_eager(name: str, rows: int, size: int, coverage: float) -> None:
    function = FUNCTIONS[name]
    # No two values are equal.
    x = torch.stack([torch.randperm(size) for _ in range(rows)]) + torch.arange(rows)[:, None] * size
    compiled = tov.compile(function, dynamic=False, options={"min_partition_us": 0})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.float()), function(x.float()))
    assert compiled.report.summary.coverage == coverage, compiled.report.to_text()
    assert bool(compiled.report.fallback_counts()) == (coverage < 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 20, 300])
def test_few_of_many_values(count: int, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        return x.topk(count), x.topk(count, largest=False), x.t().topk(count, 0)

    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        for size in (5000, 5000 + 100 * dynamic):
            x = torch.stack([torch.randperm(size), torch.randperm(size)]).float()
            torch.testing.assert_close(compiled(x), function(x))
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()
