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


def test_one_token() -> None:
    q, mask = torch.randn(1, 1, 4), torch.full((1, 1), MIN)
    compiled = tov.compile(composed, options=OPTIONS)
    torch.testing.assert_close(compiled(q, mask), q, rtol=0.03, atol=0.03)


def test_infinity_stays_infinite() -> None:
    q, mask = torch.randn(2, 8, 16), masked(8, -torch.inf)
    result = tov.compile(composed, options=OPTIONS)(q, mask)
    assert result[:, 0].isnan().all() and not result[:, 1:].isnan().any()
