"""Formulas of symbolic sizes are computed as torch computes them, and never run as Python."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import torchserve_openvino as tov
from helpers import check
from torchserve_openvino.backend.spec import value_of_formula


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0 + 3", 13), ("2*s0", 20), ("s0*s1", 70), ("(s0 - 1)//2", 4), ("((s0 + 1)//2) - 1", 4), ("s0/2", 5),
        ("s0**2", 100), ("-s0 + 12", 2), ("Max(1, s0, s1)", 10), ("Mod(s0, 3)", None), ("s0%3", 1), ("s0/3", None),
        ("s9 + 1", None), ("u0", None), ("s0//0", None), ("s0**99", None), ("1.5*s0", None), ("s0 +", None),
        ("9", None),
        ("__import__('os').getpid()", None), ("(lambda: 1)()", None), ("s0 if s1 else 1", None),
    ],
)  # fmt: skip
def test_the_value(text: str, value: int | None) -> None:
    assert value_of_formula(text, {"s0": 10, "s1": 7}) == value


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_it_is_the_size_that_torch_gives(data: st.DataObject) -> None:
    """Through a model whose result has such a size: a wrong value would be a fallback."""
    more, step = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))

    def model(x: torch.Tensor) -> Any:
        return torch.cat([x, x[:, :more]], 1)[:, ::step] * 2, torch.nn.functional.max_pool1d(x[None], 3, step)[0]

    compiled = check(model, torch.randn(2, 11), dynamic=True, options={"min_partition_us": 0})
    check(model, torch.randn(2, data.draw(st.integers(6, 40))), compiled=compiled)


def test_a_wrong_shape_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if OpenVINO computed one: eager answers, counted."""
    compiled = tov.compile(lambda x: torch.cat([x, x[:, :2]], 1) * 2, dynamic=True, options={"min_partition_us": 0})
    with torch.no_grad():
        compiled(torch.randn(2, 5))
        monkeypatch.setattr("torchserve_openvino.backend.spec.value_of_formula", lambda text, known: 3)
        x = torch.randn(2, 6)
        torch.testing.assert_close(compiled(x), torch.cat([x, x[:, :2]], 1) * 2)
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "runtime_failed"
    assert "returned the shape [2, 8] where torch returns [2, 3]" in fallback.reason
