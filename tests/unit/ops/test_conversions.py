"""Operators that this package builds from OpenVINO operations, compared with eager PyTorch."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import torchserve_openvino as tov
from helpers import check

X = torch.randn(4, 5, 6)
I = torch.tensor  # noqa: E741


def put(x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    return torch.ops.aten.index_put.default(x, indices, values, accumulate)


PUTS: list[tuple[str, list[Any], tuple[int, ...]]] = [
    ("rows", [I([0, 3])], (2, 5, 6)),
    ("negative", [I([-1, 0])], (2, 5, 6)),
    ("one value for all", [I([1, 2])], ()),
    ("elements", [I([0, 1]), I([2, 3]), I([4, -5])], (2,)),
    ("middle", [None, I([1, 4])], (4, 2, 6)),
    ("last", [None, None, I([5, 0, 1])], (4, 5, 3)),
    ("two neighbors behind", [None, I([0, 1, 2]), I([3, 4, 5])], (4, 3)),
    ("two apart", [I([0, 1]), None, I([2, 3])], (2, 5)),
    ("broadcast indices", [I([[0], [1]]), I([2, 3, 4])], (2, 3, 6)),
    ("values that are broadcast", [None, I([1, 4])], (2, 1)),
    ("a scalar index", [I(2)], (5, 6)),
]


@pytest.mark.parametrize(("indices", "shape"), [case[1:] for case in PUTS], ids=[case[0] for case in PUTS])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(indices: list[Any], shape: tuple[int, ...], accumulate: bool) -> None:
    values = torch.randn(shape)
    check(lambda x, v: put(x, indices, v, accumulate), X, values)
    given_indices = [i for i in indices if i is not None]

    def at_run_time(x: Tensor, v: Tensor, *found: Tensor) -> Tensor:
        left = iter(found)
        return put(x, [None if i is None else next(left) for i in indices], v, accumulate)

    check(at_run_time, X, values, *given_indices)
    check(at_run_time, X, values, *given_indices, dynamic=True)


def test_index_put_adds_up_what_comes_twice() -> None:
    check(lambda x, i, v: put(x, [i], v, True), torch.zeros(4), I([1, 1, 1, 3]), I([1.0, 2.0, 3.0, 4.0]))


def test_a_sum_of_wide_integers_stays_in_eager() -> None:
    big = torch.full((3,), 2**31 - 1)
    check(lambda x, i, v: put(x, [i], v, True), big, I([0, 0, 1]), big.clone(), coverage=0.0,
          fallbacks={"unsupported_op": 1})  # fmt: skip


def test_assignment_by_index() -> None:
    def model(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[:, i] = 0.5
        return y + 1

    check(model, X, I([0, 2]))


def test_index_put_refuses_an_index_beyond_the_end_as_eager_does() -> None:
    compiled = tov.compile(lambda x, i: put(x, [i], x[:1]))
    with torch.no_grad():
        compiled(X, I([1]))
        with pytest.raises(IndexError, match="out of"):
            compiled(X, I([4]))


@pytest.mark.parametrize("mask", [torch.rand(4, 5, 6) > 0.5, torch.rand(4) > 0.5], ids=["all", "rows"])
def test_one_value_through_a_mask(mask: Tensor) -> None:
    check(lambda x, m: put(x, [m], torch.tensor(7.0)) + 1, X, mask)


@pytest.mark.parametrize("axes", [3, 1])
def test_writes_where_sizes_are_known_at_run_time_only(axes: int) -> None:
    """As in wav2vec2: its padding is set to zero, and the last frame of each recording to one."""

    def model(x: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, marks = x * 2, torch.zeros(x.shape[:2])
        y[~mask] = 0
        marks[torch.arange(x.shape[0]), lengths - 1] = 1
        return y + 1, marks.flip([-1]).cumsum(-1)

    compiled = tov.compile(model, dynamic=True)
    for batch, length in ((4, 5), (2, 7), (3, 9)):
        x = torch.randn(batch, length, 6)
        check(model, x, torch.rand(x.shape[:axes]) > 0.5, torch.randint(1, length, (batch,)), compiled=compiled)


def test_several_values_through_a_mask_stay_in_eager() -> None:
    mask = torch.tensor([True, False, True, False])
    check(
        lambda x, m, v: put(x, [m], v) @ x.mT, X, mask, torch.randn(2, 1, 1), coverage=None,
        fallbacks={"unsupported_op": 1},
    )  # fmt: skip


REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.quick(dim=[1])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_reduce(reduce: str, include_self: bool, dim: int) -> None:
    index = torch.randint(0, 4, (3, 4, 5))
    check(
        lambda x, i, s: x.scatter_reduce(dim, i, s, reduce, include_self=include_self), X, index, torch.randn(4, 5, 6)
    )


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_scatter_reduce_of_integers(reduce: str) -> None:
    x, s = torch.randint(-5, 5, (2, 6), dtype=torch.int32)
    compiled = tov.compile(lambda x, i, s: x.scatter_reduce(0, i, s, reduce))
    index = torch.randint(0, 6, (6,))
    with torch.no_grad():
        assert torch.equal(compiled(x, index, s), x.scatter_reduce(0, index, s, reduce))


@pytest.mark.parametrize("reduce", ["amax", "amin", "sum", "mean"])
def test_scatter_reduce_of_what_is_no_number(reduce: str) -> None:
    x, s = I([1.0, float("nan"), 3.0, float("-inf")]), I([float("nan"), 2.0, float("inf"), 1.0])
    compiled = tov.compile(lambda x, i, s: x.scatter_reduce(0, i, s, reduce))
    index = I([0, 1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, index, s), x.scatter_reduce(0, index, s, reduce), equal_nan=True)


PADS: list[tuple[Callable[..., Tensor], tuple[int, ...], list[int]]] = [
    (torch.ops.aten.replication_pad1d.default, (2, 3, 5), [2, 1]),
    (torch.ops.aten.replication_pad1d.default, (3, 5), [0, 7]),
    (torch.ops.aten.replication_pad1d.default, (2, 3, 5), [-1, 2]),
    (torch.ops.aten.replication_pad2d.default, (2, 3, 4, 5), [1, 2, 3, 4]),
    (torch.ops.aten.replication_pad2d.default, (3, 4, 5), [-1, 0, 0, -2]),
    (torch.ops.aten.replication_pad3d.default, (1, 2, 3, 4, 5), [1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("pad", "shape", "padding"), PADS)
def test_replication_pad(pad: Callable[..., Tensor], shape: tuple[int, ...], padding: list[int]) -> None:
    check(lambda x: pad(x, padding), torch.randn(shape))


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_index_put_of_any_shape(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    chosen = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)).filter(any))
    length = data.draw(st.integers(1, 3))
    indices = [
        I(data.draw(st.lists(st.integers(-size, size - 1), min_size=length, max_size=length))) if use else None
        for size, use in zip(shape, chosen, strict=True)
    ]
    x = torch.randn(shape)
    torch._dynamo.reset()
    # Sums do not depend on which of two equal indices comes last.
    check(lambda x: put(x, indices, torch.tensor(0.5), True), x)


def test_symbolic_sizes_are_named_as_the_reason() -> None:
    padded = lambda x: torch.nn.functional.pad(x, (1, 1), mode="replicate") * 2
    compiled = tov.compile(padded, dynamic=True, options={"min_partition_us": 0})
    for length in (5, 7):
        x = torch.randn(2, 3, length)
        torch.testing.assert_close(compiled(x), padded(x))
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "conversion_failed" and "where its sizes are known" in fallback.reason
