"""Partitions too small to be worth offloading stay in eager PyTorch and are counted; whole graphs do not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import break_conversion_of_tanh, check
from torchserve_openvino.config import load_serving_config, resolve_options
from torchserve_openvino.errors import ConfigError

SMALL, LARGE = torch.rand(50, 50), torch.rand(1000, 1000)


def around_det(x: Tensor) -> Tensor:
    """OpenVINO has no determinant: a matmul precedes it, and two light operators follow."""
    return torch.linalg.det(x @ x.T) + x.sum()


def test_a_small_light_piece_stays_in_eager_with_its_reason() -> None:
    compiled = check(around_det, SMALL, coverage=0.4, fallbacks={"unsupported_op": 1, "tiny_partition": 2})
    left = {f.op: f for f in compiled.report.fallbacks if f.kind == "tiny_partition"}
    assert left.keys() == {"aten.sum.dim_IntList", "aten.add.Tensor"}
    for fallback in left.values():
        assert "min_partition_us: 100" in fallback.reason and fallback.where.startswith(__file__)


@pytest.mark.parametrize("options", [{"min_partition_us": 0}, {"testing": True}])
def test_every_piece_can_be_handed_over(options: dict[str, Any]) -> None:
    check(around_det, SMALL, coverage=0.8, fallbacks={"unsupported_op": 1}, options=options)


def test_a_large_piece_is_handed_over() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.det((x * 2)[:3, :3]).sin() + x

    check(model, LARGE, coverage=None, fallbacks={"unsupported_op": 1})


def test_what_runs_as_a_whole_runs_on_openvino_however_small() -> None:
    check(torch.relu, torch.rand(2), coverage=1.0)


def test_heavy_operators_are_never_tiny() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    check(model, torch.rand(2, 4), options={"disabled_ops": ["aten.relu"]}, coverage=0.8, fallbacks={"disabled_op": 1})


def test_a_stated_size_holds_for_wholes_too_so_that_single_operators_run_where_they_pay() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.relu()
        torch._dynamo.graph_break()
        return y.exp()

    check(model, torch.rand(4), fallbacks={"graph_break": 1})
    options = {"min_partition_us": 20}
    torch._dynamo.reset()
    check(model, torch.rand(4), coverage=0.0, fallbacks={"graph_break": 1, "tiny_partition": 2}, options=options)
    torch._dynamo.reset()
    check(model, torch.rand(400, 400), fallbacks={"graph_break": 1}, options=options)


def test_what_gets_small_by_a_failed_conversion_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    break_conversion_of_tanh(monkeypatch)
    check(
        lambda x: torch.tanh(x.sin()) + 1, torch.rand(3), coverage=0.0,
        fallbacks={"conversion_failed": 1, "tiny_partition": 2},
    )  # fmt: skip


@pytest.mark.parametrize("value", [-1, "many", True, float("inf"), float("nan")])
def test_the_option_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="min_partition_us"):
        resolve_options({"min_partition_us": value})


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        ({}, None),
        ({"allow": ["unsupported_op"]}, 0.0),
        ({"allow": ["unsupported_op", "tiny_partition"]}, None),
        ({"min_coverage": 0.9}, 0.0),
    ],
)
def test_a_policy_that_counts_it_switches_it_off(fallback: dict[str, Any], expected: float | None) -> None:
    config = load_serving_config({"handler": {"openvino": {"fallback": fallback}}})
    assert config.backend is not None and config.backend.options.min_partition_us == expected


def test_what_the_user_states_wins_over_the_policy() -> None:
    options = {"backend": "openvino", "options": {"min_partition_us": 5}}
    config = load_serving_config({"pt2": options, "handler": {"openvino": {"fallback": {"min_coverage": 0.5}}}})
    assert config.backend is not None and config.backend.options.min_partition_us == 5.0
