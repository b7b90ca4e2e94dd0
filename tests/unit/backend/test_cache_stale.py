"""No entry is used for the wrong call: each change of model, options or call makes another entry."""

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_models import Net, X, ask, assert_hit, assert_traced, both, cache_of, differs, entries, fresh
from torch import nn

from helpers import assert_same
from versions import TORCH

# --- weights ----------------------------------------------------------------------------------------------------


def test_retrained_weights_of_the_same_shape(tmp_path: Path) -> None:
    differs(Net(0).eval(), Net(1).eval(), tmp_path / "c", X)
    other = fresh(Net(2).eval(), tmp_path / "c")
    ask(other, X)
    assert set(cache_of(other)["nearest"]) == {"weights"}


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_a_new_file(tmp_path: Path, assign: bool) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "weights.pt")
    first, second = Net(0).eval(), Net(0).eval()
    second.load_state_dict(torch.load(tmp_path / "weights.pt"), assign=assign)
    differs(first, second, tmp_path / "c", X)


def test_one_weight_by_one_bit(tmp_path: Path) -> None:
    first, second = Net(0).eval(), Net(0).eval()
    second.second.bias.detach().view(torch.int32)[1] ^= 1
    differs(first, second, tmp_path / "c", X)


def test_weights_that_change_between_compile_and_the_first_call(tmp_path: Path) -> None:
    ask(fresh(Net(0).eval(), tmp_path / "c"), X)
    model = Net(0).eval()
    compiled = fresh(model, tmp_path / "c")
    model.load_state_dict(Net(1).state_dict())
    ask(compiled, X)
    assert_traced(compiled)


def test_weights_that_change_before_it_is_frozen_again(tmp_path: Path) -> None:
    model = Net(0).eval()
    compiled = fresh(model, tmp_path / "c")
    ask(compiled, X)
    model.load_state_dict(Net(1).state_dict())
    compiled.freeze()
    ask(compiled, X)
    found = cache_of(compiled)
    assert found["verified"]["rejected"] == 0 and set(found["nearest"]) == {"weights"}


def test_a_buffer_that_is_not_saved(tmp_path: Path) -> None:
    class Offset(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("b", torch.full((6,), value), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + self.b

    differs(Offset(1.0), Offset(2.0), tmp_path / "c", X)


@pytest.mark.parametrize("how", ["closure", "bound method", "list"])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "tensor"])
def test_weights_that_no_module_table_holds(tmp_path: Path, how: str, kind: str) -> None:
    class Inner(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            tensor = torch.full((6,), value)
            if kind == "buffer":
                self.register_buffer("w", tensor)
            else:
                self.w = nn.Parameter(tensor) if kind == "parameter" else tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * self.w

    class Holder(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.held = [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.held[0](x)

    for value in (1.0, 2.0):
        inner = Inner(value)
        model = {"closure": lambda x, i=inner: i(x), "bound method": inner.forward, "list": Holder(inner)}[how]
        compiled = fresh(model, tmp_path / "c")
        ask(compiled, X)
        assert_traced(compiled)


def test_one_instance_that_is_compiled_twice(tmp_path: Path) -> None:
    model = Net().eval()
    ask(fresh(model, tmp_path / "c"), X)
    again = fresh(model, tmp_path / "c")
    ask(again, X)
    assert_hit(again)


# --- code -------------------------------------------------------------------------------------------------------


def times(factor: float) -> nn.Module:
    class Times(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * factor

    return Times()


def test_a_closure(tmp_path: Path) -> None:
    differs(times(2.0), times(3.0), tmp_path / "c", X)


def test_a_constant_inside_forward(tmp_path: Path) -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2.0

    first = Same()

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 3.0

    differs(first, Same(), tmp_path / "c", X)


GLOBAL = 2.0


class WithGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * GLOBAL


def test_a_global(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (2.0, 3.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "GLOBAL", value)
        compiled = fresh(WithGlobal(), tmp_path / "c")
        ask(compiled, X)
        assert cache_of(compiled)["verified"]["rejected"] == 0
    assert len(entries(tmp_path / "c", "call")) == 2
    assert_hit(compiled)


def test_a_constant_tensor_that_differs(tmp_path: Path) -> None:
    def make(value: float) -> Callable[..., Any]:
        return lambda x: torch.relu(x) + torch.tensor([value, 2.0, 3.0, 4.0, 5.0, 6.0])

    differs(make(1.0), make(1.5), tmp_path / "c", X)


def test_the_environment_that_forward_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lambda x: torch.relu(x) * float(os.environ["FACTOR"])
    for factor in ("2", "3"):
        monkeypatch.setenv("FACTOR", factor)
        compiled = fresh(model, tmp_path / "c")
        ask(compiled, X)
        assert_traced(compiled)


def test_training_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Hardtanh())
    differs(copy.deepcopy(model).train(), copy.deepcopy(model).eval(), tmp_path / "c", X)


def test_a_forward_hook(tmp_path: Path) -> None:
    hooked = Net().eval()
    hooked.first.register_forward_hook(lambda module, args, out: out * 2)
    for model in (Net().eval(), hooked):
        compiled = fresh(model, tmp_path / "c")
        ask(compiled, X)
        assert_traced(compiled)


# --- calls ------------------------------------------------------------------------------------------------------


class Minus(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a) - b


def test_inputs_of_one_shape_do_not_swap(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(2):
        compiled = fresh(Minus(), tmp_path / "c")
        ask(compiled, a, b)
        ask(compiled, b, a)
        ask(compiled, a=a, b=b)
        ask(compiled, b=b, a=a)
        ask(compiled, a, b=b)
    assert cache_of(compiled)["traces"] == 0


def test_inputs_that_are_one_tensor(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for pair in ((a, b), (a, a), (a, a[:]), (b, a), (a.t().contiguous().t(), b)):
        for _ in range(2):
            ask(fresh(Minus(), tmp_path / "c"), *pair)


@pytest.mark.parametrize("swap", [False, True])
def test_the_order_of_inputs_in_the_graph_is_not_that_of_the_call(tmp_path: Path, swap: bool) -> None:
    def model(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(c) - b
        return (y, a - c) if swap else (a * 3, y - a)

    both(lambda: model, tmp_path / "c", torch.randn(4), torch.randn(4), torch.randn(4))


def test_same_name_of_another_class(tmp_path: Path) -> None:
    first = type("Same", (nn.Module,), {"forward": lambda self, x: torch.relu(x) + 1})()
    second = type("Same", (nn.Module,), {"forward": lambda self, x: torch.relu(x) - 1})()
    differs(first, second, tmp_path / "c", X)


@pytest.mark.parametrize(
    "more",
    [
        {"disabled_ops": ["aten.relu"]},
        {"decompositions": ["aten.gelu"]},
        {"fallback_to": "inductor"},
    ],
    ids=str,
)
def test_options_of_the_graph(tmp_path: Path, more: dict[str, Any]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.relu(x)) * 2

    ask(fresh(model, tmp_path / "c"), X)
    cold = fresh(model, tmp_path / "c", **more)
    ask(cold, X)
    assert_traced(cold)
    assert set(cache_of(cold)["nearest"]) == {"options"}
    warm = fresh(model, tmp_path / "c", **more)
    ask(warm, X)
    assert_hit(warm)
    assert warm.report.fallback_counts() == cold.report.fallback_counts()
    assert warm.report.summary.coverage == cold.report.summary.coverage


@pytest.mark.parametrize(
    "config",
    [{"INFERENCE_PRECISION_HINT": "bf16"}, {"EXECUTION_MODE_HINT": "ACCURACY"}, {"PERFORMANCE_HINT": "THROUGHPUT"}],
    ids=str,
)
def test_options_of_the_device_compile_the_stored_graph_again(tmp_path: Path, config: dict[str, str]) -> None:
    ask(fresh(Net().eval(), tmp_path / "c"), X)
    before = len(entries(tmp_path / "c", "blob"))
    model = Net().eval()
    other = fresh(model, tmp_path / "c", config=config)
    with torch.no_grad():
        torch.testing.assert_close(other(X), model(X), rtol=5e-2, atol=5e-2)
    cache = cache_of(other)
    assert (cache["traces"], cache["imports"], cache["compiles"]) == (0, 0, 1)
    assert len(entries(tmp_path / "c", "blob")) == before + 1
    assert len(entries(tmp_path / "c", "call")) == 1


def test_threads_and_streams_share_a_blob(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "c", config={"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}), X)
    warm = fresh(Net().eval(), tmp_path / "c", config={"INFERENCE_NUM_THREADS": 2, "NUM_STREAMS": 1})
    ask(warm, X)
    assert_hit(warm)


def test_signatures(tmp_path: Path) -> None:
    def model(x: torch.Tensor, scale: Any = 1.0, flag: bool = False) -> torch.Tensor:
        y = torch.relu(x) * scale
        return y + 1 if flag else y

    calls = [
        ((X,), {}),
        ((X[:1],), {}),
        ((X.reshape(3, 4),), {}),
        ((X.double(),), {}),
        ((X.int(),), {}),
        ((X.bfloat16(),), {}),
        ((X, 2.0), {}),
        ((X, 3.0), {}),
        ((X, 2), {}),
        ((X, True), {}),
        ((X,), {"scale": 2.0}),
        ((X,), {"flag": True}),
        ((X, 1.0, 1), {}),
    ]
    for process in range(2):
        compiled = fresh(model, tmp_path / "c")
        for args, kwargs in calls:
            ask(compiled, *args, **kwargs)
        if process == 0:
            assert cache_of(compiled)["calls"] == {"hits": 0, "misses": len(calls)}
    assert_hit(compiled, len(calls))
    assert len(entries(tmp_path / "c", "call")) == len(calls)


# tests/contract/test_torch.py reproduces it without this package.
@pytest.mark.xfail(TORCH < (2, 15), strict=True, reason="Dynamo treats 0.0 and -0.0 as the same input")
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zero_and_minus_zero(tmp_path: Path, first: float) -> None:
    compiled = fresh(lambda x, s: torch.relu(x) / s, tmp_path / "c")
    for scale in (first, -first):
        ask(compiled, torch.ones(3), scale)


def test_grad_modes(tmp_path: Path) -> None:
    model = Net().eval()
    for _ in range(2):
        compiled = fresh(model, tmp_path / "c")
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
            with mode():
                got, expected = compiled(X), model(X)
                assert_same(got, expected)
                assert got.requires_grad == expected.requires_grad and got.is_inference() == expected.is_inference()


def test_gradients_with_a_filled_cache(tmp_path: Path) -> None:
    for _ in range(2):
        model, twin = Net().eval(), Net().eval()
        compiled = fresh(model, tmp_path / "c")
        ask(compiled, X)
        compiled(X).sum().backward()
        twin(X).sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(a.grad, b.grad)


def test_autocast(tmp_path: Path) -> None:
    model = Net().eval()
    for _ in range(2):
        compiled = fresh(model, tmp_path / "c")
        ask(compiled, X)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            got, expected = compiled(X), model(X)
        assert got.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
        ask(compiled, X)


@pytest.mark.parametrize("frozen", [True, False])
def test_autocast_to_another_type(tmp_path: Path, frozen: bool) -> None:
    model = Net().eval()
    for order in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        compiled = fresh(model, tmp_path / "c", frozen=frozen)
        for dtype in order:
            with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
                got, expected = compiled(X), model(X)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
        assert cache_of(compiled)["verified"]["rejected"] == 0


def test_default_type(tmp_path: Path) -> None:
    model = lambda x: torch.relu(x) + torch.ones(6)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            compiled = fresh(model, tmp_path / "c")
            ask(compiled, X)
        finally:
            torch.set_default_dtype(torch.float32)
    assert_hit(compiled)
