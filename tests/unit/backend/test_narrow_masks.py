"""Masks of torch.finfo(torch.float32).min in bfloat16: rows of which everything is masked are means, not NaN."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov

MIN = torch.finfo(torch.float32).min
OPTIONS: dict[str, Any] = {"precision": "bf16", "min_partition_us": 0}


def attention(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def composed(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ q.transpose(-1, -2) + mask).softmax(-1) @ q


def filled(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ q.transpose(-1, -2)).masked_fill(mask < 0, MIN).softmax(-1) @ q


def chosen(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.where(mask < 0, MIN, 0.0))


def inverted(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers extends masks of 0 and 1."""
    return attention(q, (1.0 - (mask == 0).float()) * MIN)


def sliced(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(q, torch.cat([mask, mask], -1)[..., : q.shape[-2]])


def opened(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers opens rows of which everything is masked."""
    return attention(q, mask.mul(~torch.all(mask == MIN, dim=-1, keepdim=True)))


def twice(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A second layer would multiply NaN by 0."""
    return attention(attention(q, mask), mask)


FORMS = {f.__name__: f for f in (attention, composed, filled, chosen, inverted, sliced, opened, twice)}


def masked(size: int, value: float) -> torch.Tensor:
    mask = torch.zeros(size, size)
    mask[:, -1] = mask[0] = value
    return mask


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_masked_as_a_whole_are_means(form: str, dynamic: bool) -> None:
    function = FORMS[form]
    compiled = tov.compile(function, dynamic=dynamic, options=OPTIONS)
    generator = torch.Generator().manual_seed(0)
    for size in (8, 33):
        # Scores of some tens would be told apart even beside -1e9.
        q = torch.randn(2, 3, size, 64, generator=generator) / 8
        for mask in (masked(size, MIN), masked(size, -1e9), torch.zeros(size, size)):
            torch.testing.assert_close(compiled(q, mask), function(q, mask), rtol=0.03, atol=0.03)
    assert compiled.report.summary.coverage == 1.0


def layers(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        q = (q @ q.transpose(-1, -2) + mask).softmax(-1) @ q
    return q


# As BERT of former transformers, Funnel and models ported from TensorFlow compute theirs, with their constants.
COMPUTED = {
    "subtracted": lambda q, mask, least: layers(q, -least * (1.0 - mask)),
    "multiplied": lambda q, mask, least: layers(q, (mask - 1.0) * least),
    "added": lambda q, mask, least: layers(q, mask * least - least),
    "in each layer": lambda q, mask, least: layers(layers(q, (1 - mask[:, None, None]) * -least), 0.0),
    "of integers": lambda q, mask, least: layers(q, (1 - mask.long()) * -least),
    "attention": lambda q, mask, least: attention(attention(q, (1.0 - mask) * -least), (1.0 - mask) * -least),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("least", [1e4, 1e6, 1e9, 3e38])
@pytest.mark.parametrize("form", COMPUTED)
def test_what_a_computed_mask_lets_through_keeps_its_digits(form: str, least: float, dynamic: bool) -> None:
    def function(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return COMPUTED[form](q, mask, least)

    compiled = tov.compile(function, dynamic=dynamic, options=OPTIONS)
    for size in (8, 33):
        q = torch.randn(2, 3, size, 64, generator=torch.Generator().manual_seed(0)) / 3
        mask = (torch.arange(size)[None] < torch.tensor([[size], [size // 2]])).float()
        if form != "in each layer":
            mask = mask[:, None, None]
        expected = function(q, mask)
        # 0.4 where the mask is not exact.
        torch.testing.assert_close(compiled(q, mask), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_one_token() -> None:
    q, mask = torch.randn(1, 1, 4), torch.full((1, 1), MIN)
    compiled = tov.compile(composed, options=OPTIONS)
    torch.testing.assert_close(compiled(q, mask), q, rtol=0.03, atol=0.03)


def test_infinity_stays_infinite() -> None:
    q, mask = torch.randn(2, 8, 16), masked(8, -torch.inf)
    result = tov.compile(composed, options=OPTIONS)(q, mask)
    assert result[:, 0].isnan().all() and not result[:, 1:].isnan().any()
