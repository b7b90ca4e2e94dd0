"""Mixtures of experts as transformers computes them: rows sorted by expert, counted, and multiplied in groups."""

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import TOLERANCE, check

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

ALL = {"min_partition_us": 0}


class Grouped(nn.Module):
    def __init__(self, experts: int, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, outer, inner) / inner**0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        count = self.weight.shape[0]
        rows = torch.histc(torch.sort(chosen)[0].float(), bins=count, min=0, max=count - 1)
        ends = torch.cumsum(rows, 0, dtype=torch.int32)
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight.transpose(-2, -1), ends)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_are_multiplied_with_the_matrix_of_their_expert(dynamic: bool) -> None:
    model, x, chosen = Grouped(8, 256, 512).eval(), torch.randn(500, 256), torch.randint(0, 8, (500,))
    compiled = check(model, x, chosen, dynamic=dynamic, options=ALL)
    for other in (torch.full_like(chosen, 3), torch.where(chosen > 4, 7, 0), torch.where(chosen > 6, 8, chosen)):
        # Experts without rows; rows of an expert elsewhere are 0.
        check(model, x, other, compiled=compiled)
    check(model, x[:33], chosen[:33], compiled=compiled)


def test_more_experts_stay_in_eager() -> None:
    model = Grouped(128, 64, 64).eval()
    compiled = check(
        model, torch.randn(8, 64), torch.randint(0, 128, (8,)), coverage=None, fallbacks={"unsupported_op": 1},
        options=ALL,
    )  # fmt: skip
    assert "more than 64 experts" in compiled.report.fallbacks[0].reason


def test_counts_by_bins() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.histc(10, -1, 1), x.histc(7, 0.0, 3.5)

    x = torch.randn(1000)
    x[:5] = torch.tensor([-1.0, 1.0, 3.5, 0.5, float("inf")])
    check(model, x, options=ALL)
    # By default, the values themselves bound the bins.
    check(lambda x: x.histc(10), x[5:], options=ALL, coverage=0.0, fallbacks={"unsupported_op": 1})


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_model_of_experts_is_one_partition(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, vocab_size=1000, num_experts_per_tok=2, num_local_experts=8, num_experts=8,
        moe_intermediate_size=128,
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(3, 1000, (2, 33))
    compiled = tov.compile(model, dynamic=dynamic)
    with torch.no_grad():
        expected, got = model(ids).last_hidden_state, compiled(ids).last_hidden_state
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert (compiled.report.summary.coverage, compiled.report.summary.partitions) == (1.0, 1), compiled.report.to_text()
