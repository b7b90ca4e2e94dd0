"""nn.MultiheadAttention and nn.TransformerEncoder with every kind of mask, against eager PyTorch's fast paths."""

from typing import Any

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check

B, L, D, H = 3, 5, 8, 2
X = torch.randn(B, L, D)
PADDING = torch.arange(L) >= torch.tensor([[3], [4], [5]])
ALL_PADDED = torch.arange(L) >= torch.tensor([[3], [4], [0]])
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


def minus_infinity(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


PADDINGS = {
    "none": None,
    "bool": PADDING,
    "all padded": ALL_PADDED,
    "float": minus_infinity(PADDING),
    "added": torch.randn(B, L),
}
MASKS = {
    "none": None,
    "bool": CAUSAL,
    "float": minus_infinity(CAUSAL),
    "added": torch.randn(L, L),
    "each head": CAUSAL.expand(B * H, L, L).contiguous(),
    "each head added": torch.randn(B * H, L, L),
}
each_padding = pytest.mark.parametrize("padding", PADDINGS)
each_mask = pytest.mark.parametrize("mask", MASKS)


@pytest.mark.quick(padding=["none", "bool", "all padded"], mask=["none", "bool", "each head added"])
@each_padding
@each_mask
def test_attention(padding: str, mask: str) -> None:
    masks: dict[str, Any] = {"key_padding_mask": PADDINGS[padding], "attn_mask": MASKS[mask]}
    model = nn.MultiheadAttention(D, H, batch_first=True).eval()
    check(model, X, X, X, **masks)
    # When traced, a layer uses torch's fused attention, which returns 0 for a fully masked row. So does eager without
    # the layer's own fast path, which returns NaN.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast and padding != "all padded")
    try:
        check(model, X, X, X, need_weights=False, **masks)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def test_attention_with_the_weights_of_each_head() -> None:
    model = nn.MultiheadAttention(D, H).eval()
    check(model, X, X, X, average_attn_weights=False, strides=False)
    check(model, X, X, X, attn_mask=MASKS["float"][:B, :B], is_causal=True, need_weights=False, strides=False)


@pytest.mark.quick(padding=["none", "bool", "all padded"], mask=["none", "bool", "each head added"])
@each_padding
@each_mask
def test_encoder(padding: str, mask: str) -> None:
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    check(model, X, mask=MASKS[mask], src_key_padding_mask=PADDINGS[padding])


@pytest.mark.parametrize("options", [{"norm_first": True}, {"activation": "gelu"}, {"batch_first": False}])
def test_other_encoders(options: dict[str, Any]) -> None:
    layer = nn.TransformerEncoderLayer(D, H, 16, **{"batch_first": True, **options})
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = X if options.get("batch_first", True) else X.transpose(0, 1)
    check(model, x, mask=MASKS["bool"], src_key_padding_mask=PADDING, strides=False)


@pytest.mark.parametrize(
    "padding", ["bool", *(pytest.param(each, marks=pytest.mark.slow) for each in ("all padded", "float"))]
)
def test_padded_positions_are_zero_as_nested_tensors_make_them(padding: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True)
            self.first = nn.TransformerEncoder(layer, 2)
            self.second = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.third = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D))

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
            y = self.first(self.first(x, src_key_padding_mask=padding), src_key_padding_mask=padding)
            return y, self.second(x, src_key_padding_mask=padding), self.third(x, src_key_padding_mask=padding)

    compiled = check(Model().eval(), X, PADDINGS[padding])
    # If the padding is not at the end, eager computes the padded positions.
    in_front = PADDING.flip(1) if padding != "float" else minus_infinity(PADDING.flip(1))
    check(compiled.eager, X, in_front, compiled=compiled)


def test_the_whole_transformer() -> None:
    model = nn.Transformer(D, H, 1, 1, 16, batch_first=True).eval()
    check(model, X, X, tgt_mask=MASKS["float"], src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)


def test_other_values_of_a_mask() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True)
    compiled = tov.compile(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())
    with torch.no_grad():
        for mask in (MASKS["float"], MASKS["added"], MASKS["float"].T.contiguous()):
            assert_same(compiled(X, mask=mask), compiled.eager(X, mask=mask))
    assert compiled.report.summary.graphs == 1
