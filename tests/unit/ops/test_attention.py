"""Attention in which several heads of queries share one head of keys and values, against eager PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchserve_openvino as tov
from helpers import check

B, HEADS, LENGTH, FEATURES = 2, 6, 9, 16
PAD = torch.arange(LENGTH) < torch.tensor([LENGTH, 5])[:, None]
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": PAD[:, None, None, :].expand(B, 1, LENGTH, LENGTH)},
    "float": {"attn_mask": torch.randn(B, 1, LENGTH, LENGTH)},
    "scaled": {"is_causal": True, "scale": 0.5},
}


def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(query * 2, key, value, enable_gqa=True, **how) + 1


class Grouped(nn.Module):
    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return grouped(query, key, value, **self.how)


def inputs(shared: int, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
    shapes = [(B, heads, length, FEATURES) for heads in (HEADS, shared, shared)]
    return tuple(torch.randn(shape) for shape in shapes)


@pytest.mark.quick(shared=[1, 3], backend=["openvino"])
@pytest.mark.parametrize("shared", [1, 2, 3, HEADS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_shared_heads_run_on_openvino(mask: str, shared: int, backend: str) -> None:
    model = Grouped(MASKS[mask]).eval()
    check(model, *inputs(shared), compiled=tov.compile(model, options={"min_partition_us": 0}, backend=backend))


def test_shared_heads_of_any_length() -> None:
    compiled = None
    for length in (LENGTH, 17, 5):
        compiled = check(
            lambda q, k, v: grouped(q, k, v, is_causal=True), *inputs(2, length), compiled=compiled, dynamic=True,
            options={"min_partition_us": 0},
        )  # fmt: skip


@pytest.mark.quick(features=[64], dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("features", [32, 64, 128])
def test_causal_queries_may_be_fewer_or_more_than_keys(features: int, precision: str, dynamic: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    options = {"precision": precision, "min_partition_us": 0}
    compiled = tov.compile(attend, dynamic=dynamic, options=options)
    for queries, keys in ((1, 64), (33, 64), (64, 33), (1, 257), (1, 2), (100, 257)):
        q, k, v = (torch.randn(2, 4, length, features) for length in (queries, keys, keys))
        tolerance = 4e-2 if precision == "bf16" else 1e-4
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v), rtol=tolerance, atol=tolerance)
    assert not compiled.report.fallback_counts()


def test_a_llama_prefill_is_one_partition() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    def prefill(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    compiled = check(prefill, torch.randint(0, 64, (1, 12)))
    assert compiled.report.summary.partitions == 1, compiled.report.to_text()


class ByHand(nn.Module):
    """Attention as it is written by hand; XGLM and GroupViT mask and normalize it between two pairs of views."""

    def __init__(self, returns_weights: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.returns_weights = returns_weights

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (each(x).view(b, n, 2, 64).transpose(1, 2).reshape(2 * b, n, 64) for each in self.layers)
        scores = torch.bmm(q, k.transpose(1, 2)) * 64**-0.5
        scores = (scores.view(b, 2, n, n) + mask).view(2 * b, n, n)
        weights = F.softmax(scores, -1)
        if self.returns_weights:
            weights = weights.view(b, 2, n, n).view(2 * b, n, n)
        return torch.bmm(weights, v).view(b, 2, n, 64).transpose(1, 2).reshape(b, n, d)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("returns_weights", [False, True])
def test_attention_by_hand_is_one_partition(returns_weights: bool, dynamic: bool) -> None:
    x, mask = torch.randn(2, 33, 128), torch.zeros(2, 1, 33, 33)
    mask[1, :, :, 20:] = torch.finfo(torch.float32).min
    compiled = check(ByHand(returns_weights).eval(), x, mask, dynamic=dynamic)
    assert compiled.report.summary.partitions == 1


def test_a_norm_of_groups_with_dynamic_shapes_is_one_partition() -> None:
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 32, 3)).eval()
    compiled = check(model, torch.randn(2, 32, 24, 20), dynamic=True, strides=False)
    check(model, torch.randn(3, 32, 30, 50), compiled=compiled, strides=False)
    assert compiled.report.summary.partitions == 1
