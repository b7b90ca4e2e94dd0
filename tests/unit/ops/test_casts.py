"""Casts round as torch does, and outputs have the memory layout of torch's operators."""

import pytest
import torch
from torch.nn import functional as F

import torchserve_openvino as tov

OPTIONS = {"min_partition_us": 0}
INTEGERS = torch.tensor([-627, 797, 515, -2049, 4099, 65519, 100001, 16777217, 3, 70000])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_an_integer_that_becomes_a_narrow_float_is_rounded(kind, wanted, dynamic) -> None:
    def forward(x):
        return x.to(wanted).to(torch.float32) * 2, x.to(wanted)

    compiled = tov.compile(forward, dynamic=dynamic, options=OPTIONS)
    x = INTEGERS.to(kind)
    torch.testing.assert_close(compiled(x), forward(x), rtol=0, atol=0)


LAYOUTS = {
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "copysign": torch.copysign,
    "fmax": torch.fmax,
    "to bool": lambda x, y: x.to(torch.bool, memory_format=torch.contiguous_format),
    "bool": lambda x, y: x.bool(),
}


@pytest.mark.quick(other=[(2, 1, 4)])
@pytest.mark.parametrize("other", [(), (2, 1, 4), (4,), (2, 3, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_that_of_the_operator(name, other) -> None:
    compiled = tov.compile(LAYOUTS[name], options=OPTIONS)
    x, y = torch.randn(3, 4, 2).permute(2, 0, 1), torch.randn(other)
    expected, got = LAYOUTS[name](x, y), compiled(x, y)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()


def test_an_encoder_layer_answers_contiguously() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 4, 3).transpose(1, 2)
    with torch.no_grad():
        got, expected = tov.compile(layer, options=OPTIONS)(x), layer(x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride() == (12, 4, 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_value_beyond_float16_becomes_infinite(kind) -> None:
    def forward(x):
        return (x * 1).to(torch.float16) * 1

    compiled = tov.compile(forward, options=OPTIONS)
    for values, fallbacks in ([65280.0, 3.0], {}), ([65536.0, -7e4], {"runtime_failed": 1}):
        x = torch.tensor(values, dtype=kind)
        assert torch.equal(compiled(x), forward(x))
        assert compiled.report.fallback_counts() == fallbacks


@pytest.mark.parametrize("last", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("middle", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rounding_of_a_cast_is_not_dropped_by_the_next(kind, middle, last) -> None:
    def forward(x):
        return (x * 1).to(middle).to(last)

    compiled = tov.compile(forward, options=OPTIONS)
    x = torch.tensor([1e-6, 3.3e-8, 1.2345, 65000.0, -1e-30]).to(kind)
    torch.testing.assert_close(compiled(x), forward(x), rtol=0, atol=0)


REFUSED = {
    "probabilities beyond 1": (lambda p: F.binary_cross_entropy(p, p.round().clamp(0, 1)), torch.tensor([0.5, 1.5])),
    "negative places": (
        lambda i: F.max_unpool1d(torch.tensor([[[1.0, 2.0]]]), i.long().reshape(1, 1, 2), 2),
        torch.tensor([0.0, -1.0]),
    ),
    "labels beyond the last": (
        lambda i: F.cross_entropy(torch.ones(2, 3), i.long(), reduction="none"),
        torch.tensor([3.0, 2.0]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name) -> None:
    function, given = REFUSED[name]
    compiled = tov.compile(function, options=OPTIONS)
    for call in (function, compiled):
        with pytest.raises((RuntimeError, IndexError)):
            call(given)


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_a_number_that_is_copied(kind, backend) -> None:
    def forward(x, y):
        x.copy_(y)

    compiled = tov.compile(forward, backend=backend, options=OPTIONS)
    with torch.no_grad():
        for value in (3.0, -2.0):
            x, y = torch.tensor(1.0), torch.tensor(value, dtype=kind)
            compiled(x, y)
            assert x.item() == value
            compiled(x, x)
            assert x.item() == value


def test_a_cast_that_depends_on_no_input_is_computed_in_torch() -> None:
    """As in T5's relative positions: the logarithm of 0 becomes an integer that is not used."""

    def forward(x):
        distance = torch.arange(20)[:, None] - torch.arange(20)[None, :]
        far = 4 + (torch.log(distance.abs().float() / 4) / 2 * 4).to(torch.long)
        near = torch.where(distance.abs() < 4, distance.abs(), torch.clamp(far, max=7))
        return x[near] * 2

    compiled, x = tov.compile(forward, options=OPTIONS), torch.randn(8, 5)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), forward(x))
    assert compiled.report.fallback_counts() == {} and compiled.report.summary.coverage == 1.0


def test_a_cast_of_random_numbers_is_not_computed_beforehand() -> None:
    def forward(x):
        return x + (torch.rand(50) * 1000).to(torch.long)

    compiled, x = tov.compile(forward, options=OPTIONS), torch.zeros(50)
    with torch.no_grad():
        assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.float16])
def test_a_copy_into_another_type_is_a_cast(source, kind, dynamic) -> None:
    """Values that fit, and those that wrap around, saturate, round or become infinite."""

    def copied(y):
        out = torch.zeros(4, dtype=kind)
        out[:] = y
        filled = torch.zeros(4, dtype=kind).copy_(y)
        return out, filled, filled * filled, torch.zeros(3, dtype=kind).fill_(y[0])

    compiled = tov.compile(copied, dynamic=dynamic, options=OPTIONS)
    values = [[1.0, 0.0, 2.0, 100.0], [300.0, 256.0, -1.0, 7.0], [2.5, 515.0, 2049.0, -3.7], [3e9, 1e5, 65519.0, 0.25]]
    for row in values:
        y = torch.tensor(row, dtype=torch.float64).to(source)
        if not y.isfinite().all() or (kind is torch.uint8 and source.is_floating_point and (y.abs() > 2**31).any()):
            # Undefined in C++, and different from CPU to CPU.
            continue
        torch.testing.assert_close(compiled(y), copied(y), rtol=0, atol=0, equal_nan=True)


def test_a_copy_of_nan_and_fractions_into_booleans() -> None:
    def copied(y):
        out = torch.zeros(3, dtype=torch.bool)
        out[:] = y
        return out

    y = torch.tensor([0.5, float("nan"), 0.0])
    assert tov.compile(copied, options=OPTIONS)(y).tolist() == [True, True, False]


def test_a_copy_keeps_the_rounding_of_its_source() -> None:
    def copied(y):
        return torch.zeros(2).copy_(y.half()), torch.zeros(2).copy_(y.bfloat16())

    y = torch.tensor([1.0001, 3000.7])
    torch.testing.assert_close(tov.compile(copied, options=OPTIONS)(y), copied(y), rtol=0, atol=0)


@pytest.mark.parametrize("function", [
    lambda x: x.sum(dtype=torch.int64), lambda x: x.sum(0, dtype=torch.int64), lambda x: x.nansum(dtype=torch.int64),
    lambda x: x.sum(0, keepdim=True, dtype=torch.int32) % 7,
])  # fmt: skip
def test_a_sum_of_floats_as_integers_adds_integers(function) -> None:
    compiled = tov.compile(function, options=OPTIONS)
    for row in ([1.7, 2.6, -3.5, 0.9], [16777216.0, 1.0, 1.0, 1.0], [1e9, 1e9, 1e9, 5.0]):
        x = torch.tensor(row)
        assert compiled(x).equal(function(x)), row
