"""Integers that OpenVINO would round: computed on OpenVINO within exact limits, beyond them in eager and counted."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import torchserve_openvino as tov
from helpers import assert_same, check
from torchserve_openvino.passes.fx.int_range import EXACT_IN_FLOAT32

Function = Callable[..., Any]
ALL: dict[str, Any] = {"min_partition_us": 0}
NEAR = EXACT_IN_FLOAT32 + torch.tensor([[0, 1, 2, 3], [-(2**25) - 1, -(2**25) - 3, 4, 5]])

OPERATORS: dict[str, Function] = {
    "remainder": lambda x, y: x % 7,
    "floor division": lambda x, y: x // 3,
    "truncating division": lambda x, y: torch.div(x, 3, rounding_mode="trunc"),
    "fmod": lambda x, y: torch.fmod(x, 7),
    "equal": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "equal to a number": lambda x, y: x == 2**24 + 1,
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: x.relu(),
    "clamp": lambda x, y: x.clamp(-5, 2**24 + 3),
    "sum": lambda x, y: (x.sum(), x.sum(1)),
    "largest": lambda x, y: (x.amax(), x.max(1), x.argmax(1)),
    "filled": lambda x, y: x.masked_fill(y > 0, 2**24 + 5),
    "padded": lambda x, y: torch.constant_pad_nd(x, [1, 1], 2**24 + 1),
    "chosen by a comparison": lambda x, y: torch.where(x > 0, x + 1, y),
    "rounded": lambda x, y: (x.ceil(), x.floor(), x.round()),
}


@pytest.mark.quick(dtype=[torch.int64])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", OPERATORS)
def test_right_beyond_what_float32_holds(name: str, dtype: torch.dtype) -> None:
    function, x = OPERATORS[name], NEAR.to(dtype)
    y = x.flip(1)
    compiled = tov.compile(function, options=ALL)
    assert_same(compiled(x, y), function(x, y), strides=False)
    assert compiled.report.fallback_counts()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_what_only_moves_integers_takes_32_bits(dtype: torch.dtype) -> None:
    def moved(x: torch.Tensor) -> Any:
        return torch.cat([x, x.flip(1)]).transpose(0, 1)[1:], x.repeat(2, 1), x.float(), x.to(torch.bool)

    check(moved, (NEAR + 2**30).to(dtype), strides=False)


def test_one_small_side_makes_a_comparison_exact() -> None:
    check(lambda x: (x == 5, x > -3, x.ne(0)), NEAR, options=ALL)


def test_the_open_end_of_a_slice_is_no_number() -> None:
    shifted = lambda x: torch.slice_scatter(torch.zeros_like(x), x[:, :-1], 1, 1)
    check(shifted, torch.randint(50, (2, 8)), options=ALL)


def test_each_input_has_its_own_limit() -> None:
    """A long sum over the mask does not lower the limit of the other input."""

    def model(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids.flip(0).float() * mask.sum(-1).unsqueeze(-1)

    check(model, torch.randint(2**20, 2**23, (2, 4096)), torch.ones(2, 4096, dtype=torch.int64), options=ALL)


def test_the_message_names_the_operator_and_what_helps() -> None:
    table = torch.randn(1000, 4)
    model = lambda ids: torch.sin(table[ids % 1000]) * 2
    ids = torch.tensor([7, 2**30 + 7, 2**24 + 1])
    compiled = check(model, ids, coverage=None, fallbacks={"runtime_failed": 2})
    reason = compiled.report.fallbacks[0].reason
    assert "input 0 holds 1073741831, outside -16777216 to 16777216" in reason
    assert "disabled_ops: [aten.remainder.Scalar]" in reason
    torch._dynamo.reset()
    options = ALL | {"disabled_ops": ["aten.remainder.Scalar"]}
    check(model, ids, coverage=None, fallbacks={"disabled_op": 1}, options=options)


def _divided(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x % y, x // y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")


DIVIDED = tov.compile(_divided, options=ALL)
QUARTER = EXACT_IN_FLOAT32 // 4


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-QUARTER, QUARTER), min_size=8, max_size=8), st.integers(1, QUARTER))
def test_division_is_exact_up_to_the_limit(values: list[int], divisor: int) -> None:
    x, y = torch.tensor(values), torch.full((8,), divisor)
    assert_same(DIVIDED(x, y), _divided(x, y))
    assert not DIVIDED.report.fallbacks, DIVIDED.report.to_text()


def test_a_size_counts_where_every_answer_has_a_known_shape() -> None:
    """Sizes are checked even if no output shape is symbolic: OpenVINO's sum would stop at 2^24."""
    total = lambda x: x.sum()
    compiled = tov.compile(total, dynamic=True, options=ALL)
    ones = [torch.ones(n, dtype=torch.int64) for n in (20, 30, 2**24 + 3)]
    with torch.no_grad():
        assert [int(compiled(x)) for x in ones] == [20, 30, 2**24 + 3]
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "runtime_failed" and fallback.count == 1 and "a dimension of 16777219" in fallback.reason


def test_a_number_of_the_caller_counts_where_every_answer_has_a_known_shape() -> None:
    filled = lambda x, n: torch.full((3,), n) + n * n + x
    compiled = tov.compile(filled, dynamic=True, options=ALL)
    with torch.no_grad():
        for n in (5, 7, 2**20, 2**30, 60_000, -60_000, -(2**30)):
            torch.testing.assert_close(compiled(torch.tensor(1), n), filled(torch.tensor(1), n), rtol=0, atol=0)
    assert compiled.report.fallback_counts() == {"runtime_failed": 5}


def test_a_size_is_no_value_of_what_has_it() -> None:
    """The mask of wav2vec 2.0's frames, for recordings of half a minute: sums and divisions of sizes stay exact."""

    def frames(mask: torch.Tensor) -> torch.Tensor:
        count = mask.cumsum(-1)[:, -1]
        for kernel, stride in ((10, 5), (3, 2), (3, 2), (2, 2)):
            count = torch.div(count - kernel, stride, rounding_mode="floor") + 1
        real = torch.zeros(mask.shape[0], mask.shape[1] // 40, dtype=mask.dtype)
        real[(torch.arange(mask.shape[0]), count - 1)] = 1
        return torch.cat([real, real.expand(mask.shape[0], mask.shape[1] // 40)], 1).flip(-1).cumsum(-1).flip(-1)

    compiled = tov.compile(frames, dynamic=True, options=ALL)
    with torch.no_grad():
        for rows, samples, longest in ((2, 16_000, 9000), (3, 480_000, 480_000), (4, 64_000, 63_999)):
            mask = (torch.arange(samples) < torch.arange(longest - rows, longest)[:, None]).long()
            assert_same(compiled(mask), frames(mask), strides=False)
    assert not compiled.report.fallbacks, compiled.report.to_text()


def _bucket(distance: torch.Tensor, drops: str) -> torch.Tensor:
    """T5's bucket of a distance: the logarithm of 0 is cast to an integer, and dropped."""
    large = 8 + (torch.log(distance.float() / 8) / 2.77 * 8).to(torch.int64)
    if drops == "nothing":
        return large
    large = torch.min(large, torch.full_like(large, 15))
    near = distance < 8
    if drops == "used again":
        return torch.where(near, distance, large) + large
    if drops == "the other side":
        return torch.where(~near, large, distance)
    return torch.where(near, large if drops == "the wrong side" else distance, large)


@pytest.mark.parametrize(
    ("drops", "counted"),
    [("it", 0), ("the other side", 0), ("nothing", 2), ("used again", 2), ("the wrong side", 2)],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_casts_of_what_a_choice_drops(drops: str, counted: int, dynamic: bool) -> None:
    bucket = lambda distance: _bucket(distance, drops)
    compiled = tov.compile(bucket, dynamic=dynamic, options=ALL)
    with torch.no_grad():
        for distance in (torch.arange(12).reshape(2, 6), torch.arange(12).flip(0).reshape(2, 6)):
            assert_same(compiled(distance), bucket(distance))
    assert sum(compiled.report.fallback_counts().values()) == counted, compiled.report.to_text()


def test_the_larger_the_sizes_the_smaller_the_values_may_be() -> None:
    compiled = tov.compile(lambda x: x.sum(-1), dynamic=True, options=ALL)
    with torch.no_grad():
        for length, value in ((1000, 16_000), (1_000_000, 16), (4_000_000, 4)):
            x = torch.full((2, length), value)
            assert_same(compiled(x), x.sum(-1))
        assert not compiled.report.fallbacks, compiled.report.to_text()
        x = torch.full((2, 1_000_000), 16_001)
        assert_same(compiled(x), x.sum(-1))
    (fallback,) = compiled.report.fallbacks
    assert "outside -16 to 16" in fallback.reason


NUMBERS: dict[str, Function] = {
    "a product": lambda x, n: x * (n * n),
    "a product that is returned": lambda x, n: (x * 2, n * n),
    "a sum of products": lambda x, n: x + (n * n + n) * 3,
    "a quotient": lambda x, n: x + n // 2,
    "a quotient of a product": lambda x, n: x + (n * n) // 3,
    "a quotient that is rounded up": lambda x, n: x + -(-n // 2),
    "a fill": lambda x, n: torch.full_like(x, n * n, dtype=torch.float64) + x,
    "a limit": lambda x, n: x.clamp(max=n * n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_caller_are_computed_as_in_python(name: str) -> None:
    function, x = NUMBERS[name], torch.tensor([1.0, 2.5, 1e10])
    compiled = tov.compile(function, dynamic=True, options=ALL)
    for n in (5, 7, -3, -8, 4999, 60_000, -70_001, 2**24 - 1):
        got, expected = compiled(x, n), function(x, n)
        assert_same(got, expected)


def test_quotients_of_sizes_round_down() -> None:
    def function(x: torch.Tensor) -> Any:
        return (3 - x.shape[0]) // 2 + x, x.new_zeros(-(-x.shape[0] // 2)), x.shape[0] ** 2 // 3 + x

    compiled = tov.compile(function, dynamic=True, options=ALL)
    for length in (4, 6, 9, 2, 70_000):
        x = torch.ones(length)
        assert_same(compiled(x), function(x))


def test_an_added_number_counts_for_each_index() -> None:
    def function(i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int32).index_put((i,), torch.tensor(1001, dtype=torch.int32), True) % 10

    for count in (3, 20_001):
        i = torch.zeros(count, dtype=torch.int64)
        assert tov.compile(function, options=ALL)(i).tolist() == function(i).tolist()


def test_a_product_of_integers_at_an_index_is_not_rounded() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch.scatter_reduce(x, 0, i, factors, "prod") % 1000

    one, twice, factors = torch.ones(1).int(), torch.zeros(2).long(), torch.tensor([4097, 4097]).int()
    assert tov.compile(function, options=ALL)(one, twice, factors).tolist() == [409]


@pytest.mark.parametrize("value", [2**31, 2**31 - 1, -(2**31), -(2**31) - 1])
def test_the_ends_of_32_bits(value: int) -> None:
    constant = torch.tensor([value, 1, 2])
    models: dict[str, Function] = {
        "filled": lambda x: torch.full((3,), value) * 1 + 0 * x,
        "chosen": lambda x: torch.where(x > 0, value, x),
        "padded": lambda x: torch.constant_pad_nd(x, [1, 1], value),
        "constant": lambda x: torch.where(x > 0, constant, x),
    }
    for name, model in models.items():
        compiled, x = tov.compile(model, options=ALL, dynamic=False), torch.tensor([1, -2, 3])
        for _ in range(2):
            assert compiled(x).tolist() == model(x).tolist(), name
