"""The comparison behind every verification: which results count as equal to those of eager."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.backend.runtime.compare import (
    RELATIVE_TOLERANCE,
    SMALLEST_SCALE,
    comparable,
    copied,
    difference,
    is_finite,
    largest_allowed,
    largest_difference,
    output_tensors,
    relative_tolerance,
    reordered,
    too_far,
)

INF, NAN = math.inf, math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("precision", RELATIVE_TOLERANCE)
@given(scale=st.floats(1e-3, 1e6), share=st.floats(0.0, 3.0), seed=st.integers(0, 99))
def test_the_tolerance_is_relative_to_the_largest_value(precision: str, scale: float, share: float, seed: int) -> None:
    expected = torch.rand(7, generator=torch.Generator().manual_seed(seed)) * scale
    limit = RELATIVE_TOLERANCE[precision] * max(SMALLEST_SCALE, float(expected.max()))
    assert largest_allowed(expected, precision) == pytest.approx(limit)
    # Close to the limit, float32 rounding would decide.
    if abs(share - 1.0) > 0.05:
        got = expected.double()
        got[seed % 7] += share * limit
        found = difference(got.float(), expected, precision)
        rounding = float(expected.max()) * 2**-22
        assert bool(found) == (share > 1.0) or share * limit < rounding


def test_an_unknown_precision_has_the_widest_tolerance() -> None:
    assert relative_tolerance("i8") == RELATIVE_TOLERANCE["bf16"]


def test_an_output_of_a_narrow_type_has_the_tolerance_of_its_type() -> None:
    expected = torch.ones(4, dtype=torch.bfloat16)
    assert difference(expected * 1.05, expected, "f32") == ""
    assert "differs by" in difference(expected * 1.2, expected, "f32")


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (tensor(1.0, NAN), tensor(1.0, 2.0)),
        (tensor(1.0, 2.0), tensor(1.0, NAN)),
        (tensor(1.0, INF), tensor(1.0, 2.0)),
        (tensor(1.0, INF), tensor(1.0, -INF)),
        (tensor(1.0, 2.0), tensor(1.0, INF)),
    ],
)
def test_nan_and_infinity_at_other_places_are_never_within(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert "differs by inf" in difference(got, expected, "bf16")
    assert largest_difference(got, expected) == INF


def test_nan_and_infinity_at_the_same_places_are_equal() -> None:
    values = tensor(NAN, INF, -INF, 1.0)
    assert difference(values.clone(), values, "f32") == "" and largest_difference(values.clone(), values) == 0.0


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        ((tensor(1.0),), (tensor(1.0), tensor(2.0)), "1 outputs instead of 2"),
        (tensor(1.0, 2.0), torch.ones(2, 1), "output 0 is"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "output 0 is"),
        ({"a": tensor(1.0), "b": tensor(5.0)}, {"a": tensor(1.0), "b": tensor(2.0)}, "output 1 differs by 3"),
    ],
)
def test_structure_shape_and_type_count(got: Any, expected: Any, said: str) -> None:
    assert said in difference(got, expected, "f32")


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("numel", [1, 5, 999])
def test_integers_are_equal_whatever_their_size(kind: torch.dtype, numel: int) -> None:
    """Tokens and classes are not quantities: 100 and 101 are as different as 0 and 255."""
    expected = torch.full((numel,), 100, dtype=kind)
    got = expected.clone()
    assert difference(got, expected, "f32") == ""
    got[-1] += 1
    assert f"differs in 1 of {numel}" in difference(got, expected, "f32")


@pytest.mark.parametrize("make", [lambda n: torch.arange(n), lambda n: torch.arange(n) % 2 == 0], ids=["int", "bool"])
def test_of_many_integers_rounding_may_move_one_in_a_thousand(make: Any) -> None:
    expected = make(3000)
    got = expected.clone()
    got[:3] = ~expected[:3] if expected.dtype is torch.bool else expected[:3] + 1
    assert too_far(got, expected, "f32") == ""
    got[100:104] = ~expected[100:104] if expected.dtype is torch.bool else 7
    assert "more than 3" in too_far(got, expected, "f32")


def test_samples_in_a_lower_precision_and_integers_of_a_stated_tolerance_are_quantities() -> None:
    expected = torch.tensor([100])
    assert difference(expected.byte() + 1, expected.byte(), "bf16") == ""
    # A class or a token is none in any precision, and of a mask some may move in all.
    assert "differs in 1 of 1" in difference(expected + 1, expected, "bf16")
    mask = torch.arange(1000) % 2 == 0
    moved = mask.clone()
    moved[:3] = ~mask[:3]
    assert difference(moved, mask, "f16") == "" and "differs in 3 of 1000" in difference(moved, mask, "f32")
    assert difference(expected + 1, expected, "f32", max_abs=1.0) == ""
    assert "more than 0.5" in difference(expected + 1, expected, "f32", max_abs=0.5)


def test_large_integers_are_not_compared_as_floats() -> None:
    expected = torch.tensor([2**62])
    assert "differs in 1" in difference(expected + 1, expected, "f32")
    assert "more than 0.5" in difference(expected + 1, expected, "f32", max_abs=0.5)


class _Mapping:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def keys(self) -> Any:
        return self.values.keys()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclasses.dataclass
class Boxes:
    """An output that torch does not look into."""

    scores: torch.Tensor
    label: str = "cat"


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (Boxes(torch.ones(2)), Boxes(torch.zeros(2))),
        (Boxes(torch.ones(2), "dog"), Boxes(torch.ones(2))),
        ([1.0, 5.0], [1.0, 2.0]),
        (3, 4),
        (True, False),
        (2**70, 2**70 + 1),
        ("cat", "cats"),
        (np.float32(1), np.float32(2)),
        (np.arange(3), np.arange(3) + 1),
        (np.array(["a"]), np.array(["b"])),
        ({"boxes": [_Mapping(a=1.0)]}, {"boxes": [_Mapping(a=2.0)]}),
        (None, 1.0),
    ],
)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_what_is_no_tensor_is_compared_too(got: Any, expected: Any, precision: str) -> None:
    assert difference(expected, expected, precision) == "" and largest_difference(expected, expected) == 0.0
    assert difference(got, expected, precision) != "" and largest_difference(got, expected) > 0.0


def test_copies_lie_in_memory_like_the_originals() -> None:
    wide, narrow = torch.arange(12.0).view(3, 4), torch.arange(3.0)[:, None]
    call = (
        (wide, narrow.expand(3, 5), wide.T, wide[:, ::2]),
        {"again": wide, "windows": torch.arange(6.0).unfold(0, 3, 1)},
    )
    for other, same in ((copied(call), True), (reordered(call), False)):
        (first, expanded, turned, gaps), named = other
        assert first is named["again"] and first is not wide
        for new, old in zip((first, expanded, turned, gaps), call[0], strict=True):
            assert new.stride() == old.stride() and torch.equal(new, old) is same
            assert torch.equal(new if same else new.flip(tuple(range(new.dim()))), old)
        assert torch.equal(named["windows"], call[1]["windows"]) is same


def test_objects_without_a_value_hold_nothing_to_compare() -> None:
    assert comparable([None, object(), Boxes]) == []


def test_complex_numbers_and_nothing_at_all() -> None:
    expected = torch.tensor([1 + 1j])
    assert difference(expected * 1.0001, expected, "f32") == ""
    assert "differs by" in difference(expected * 1.1, expected, "f32")
    assert difference(torch.empty(0, 3), torch.empty(0, 3), "f32") == "" and difference((), (), "f32") == ""
    assert largest_difference((), ()) == 0.0 and largest_difference(torch.ones(1), torch.ones(2)) == INF


def test_outputs_are_found_in_any_structure() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    assert [t.shape for t in output_tensors(([a, {"x": b}], 3, None))] == [a.shape, b.shape]
    assert output_tensors(_Mapping(logits=a, note="text")) == [a]


def test_reordered_keeps_shapes_types_structure_and_grad() -> None:
    x, n = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.tensor([1, 2])
    (y, m), named = reordered(((x, n), {"flag": True}))
    assert torch.equal(y, x.flip(0, 1)) and y.requires_grad and m.tolist() == [2, 1] and named == {"flag": True}
    args, kwargs = reordered(((torch.arange(6).reshape(2, 3),), {"mask": torch.tensor([True, False]), "n": 3}))
    assert args[0].tolist() == [[5, 4, 3], [2, 1, 0]] and kwargs["n"] == 3
    assert kwargs["mask"].tolist() == [False, True]
    assert reordered((torch.ones(3), "text")) is None
    assert reordered(((torch.ones(3), 2), {})) is None
    assert reordered(torch.eye(2).to_sparse()) is None
    assert reordered(((torch.eye(3).to_sparse(),), {})) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_seen(dtype, bad) -> None:
    values = torch.randn(7, 1001).to(dtype)
    assert is_finite(values) and is_finite(values[:0]) and is_finite(torch.zeros((), dtype=dtype))
    for place in (0, 500, 1000):
        worse = values.clone()
        worse[3, place] = bad
        assert not is_finite(worse) and not is_finite(worse.T) and is_finite(worse[4:])
