"""Small tensors are copied to and from memory that a request keeps; nothing of one call shows in another."""

import math
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same, check

# Below and above the limit, in float32.
SMALL, LARGE = (4, 16), (4, 4096)


class Two(nn.Module):
    """An input and an output of each size."""

    def forward(self, small: Tensor, large: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = large.tanh().sum(1, keepdim=True)
        return small.sin() + total, large * small.mean(), total


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(SMALL), torch.randn(LARGE)


@pytest.mark.parametrize("freezes", [False, True])
def test_results_are_not_overwritten_by_later_calls(freezes: bool) -> None:
    model = Two()
    compiled = tov.compile(model, dynamic=False)
    with torch.no_grad():
        if freezes:
            compiled.freeze()
        kept = [compiled(*inputs(seed)) for seed in range(6)]
        for seed, got in enumerate(kept):
            assert_same(got, model(*inputs(seed)))
    assert len({each.data_ptr() for got in kept for each in got}) == 18


def test_threads_have_memory_of_their_own() -> None:
    model = Two()
    compiled = check(model, *inputs(0)).freeze()
    wrong: list[int] = []
    close = partial(torch.allclose, rtol=1e-3, atol=1e-3)

    def ask(thread: int) -> None:
        with torch.no_grad():
            for seed in range(thread, 200, 4):
                got, expected = compiled(*inputs_of[seed]), answers[seed]
                wrong.extend([seed] * (not all(map(close, got, expected))))

    inputs_of = [inputs(seed) for seed in range(200)]
    with torch.no_grad():
        answers = [model(*each) for each in inputs_of]
        compiled(*inputs(0)), compiled(*inputs(0))
    threads = [threading.Thread(target=ask, args=(each,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_first_call_in_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Tanh()).eval()
    compiled = tov.compile(model, dynamic=False)
    with torch.inference_mode():
        compiled(torch.randn(3, 16))
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model[0].weight.grad is not None


def test_a_result_can_be_changed_resized_and_differentiated() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum(0)

    compiled = tov.compile(Net(), dynamic=False)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    result = compiled(x, y)
    result.backward(torch.ones(4))
    assert torch.equal(x.grad, y)
    with torch.no_grad():
        first = compiled(x, y)
        first.mul_(0).resize_(1000)
        torch.testing.assert_close(compiled(x, y), (x * y).sum(0))


class Named(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("make", [
    lambda x: x.t().contiguous().t(),
    lambda x: torch.stack([x, x], 2)[..., 1],
    lambda x: x[:1].expand(4, 16),
    lambda x: nn.Parameter(x),
    lambda x: x.as_subclass(Named),
    lambda x: torch.view_as_complex(torch.stack([x, x], 2)).conj().imag,
    lambda x: x.flip(0),
], ids=["transposed", "strided", "expanded", "parameter", "subclass", "negated", "copy"])  # fmt: skip
def test_whatever_memory_an_input_has(make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), nn.Sigmoid()).eval()
    compiled = tov.compile(model, dynamic=False)
    x = make(torch.randn(SMALL))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(torch.Tensor(compiled(x)), torch.Tensor(model(x)))


TYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
    ),
    rows=st.sampled_from([0, 1, 3, 64, 127, 128, 129, 300]),
    order=st.permutations([0, 1, 2]),
)
def test_each_type_and_size_around_the_limit(kind: torch.dtype, rows: int, order: list[int]) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x > 0, x, y).permute(order), (x == y).sum(1)

    compiled = tov.compile(model, dynamic=False, options={"min_partition_us": 0})
    for seed in range(2):
        torch.manual_seed(seed)
        x, y = ((torch.randn(rows, 4, 8) * 3).to(kind) for _ in range(2))
        with torch.no_grad():
            # Eager's strides of a dimension of one element are any.
            assert_same(compiled(x, y), model(x, y), strides=rows > 1)


def test_what_was_not_written_shows_while_memory_is_poisoned() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Tanh()).eval()
    compiled = tov.compile(model, dynamic=False).freeze()
    x = torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        with compiled.poisoned():
            result = compiled(x)
    assert math.isfinite(result.sum()) and torch.allclose(result, model(x), atol=1e-5)
