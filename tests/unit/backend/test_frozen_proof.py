"""freeze() records only calls that provably do not depend on Python code outside the graph."""

import enum
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with


def mask_of_lengths(x: torch.Tensor) -> Any:
    lengths = x.sum(1).long().clamp(0, 3)
    return x * torch.tensor([[1.0] * k + [0.0] * (3 - k) for k in lengths.tolist()])


def branch(x: torch.Tensor) -> Any:
    return x * 2 if bool((x > 0).any()) else x - 1


def size_of_result(x: torch.Tensor) -> Any:
    return x * len(x.nonzero())


def through_numpy(x: torch.Tensor) -> Any:
    return x * float(np.max(x.numpy()))


def returned_number(x: torch.Tensor) -> Any:
    y = x.mean()
    return {"loss": y, "score": y.item()}


def returned_list(x: torch.Tensor) -> Any:
    return x * 2, x.flatten().long().tolist()


def returned_array(x: torch.Tensor) -> Any:
    return x * 2, x.numpy()


READING = [mask_of_lengths, branch, size_of_result, through_numpy, returned_number, returned_list, returned_array]


def equal(got: Any, expected: Any) -> None:
    as_tensors = lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    assert_same(torch.utils._pytree.tree_map(as_tensors, got), torch.utils._pytree.tree_map(as_tensors, expected))


@pytest.mark.parametrize("backend", ["openvino", "export"])
@pytest.mark.parametrize("function", READING, ids=lambda f: f.__name__)
def test_a_value_that_python_reads_is_read_at_each_call(function: Callable[..., Any], backend: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    compiled = tov.compile(Model().eval(), backend=backend).freeze()
    with torch.inference_mode():
        # The same call twice, as in a warm-up.
        for x in (torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([[3.0, 0, 0], [0, 1, 0]])):
            equal(compiled(x), function(x))
    assert compiled.frozen == 0


def test_the_reason_is_told() -> None:
    compiled = compile_with(branch, CompileSpec(own_weights=True)).freeze()
    with torch.inference_mode():
        compiled(torch.ones(2, 3))
    (reason,) = compiled.guarded_reasons
    assert "not one graph" in reason and "data-dependent" in reason


class Holder:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and bool((self.y == other.y).all())


def test_an_object_that_may_hold_tensors_is_not_repeated() -> None:
    compiled = tov.compile(lambda x: (x * 2, Holder(x * 3))).freeze()
    with torch.inference_mode():
        for x in (torch.ones(2), torch.ones(2), torch.zeros(2)):
            assert_same(compiled(x)[1].y, x * 3)
    assert compiled.frozen == 0


class Color(enum.Enum):
    RED = 1


def test_constants_beside_tensors_are_repeated() -> None:
    model = lambda x: (x * 2, x.dtype, x.shape, x.device, Color.RED, len(x), "text", None, 2.5)
    compiled = tov.compile(model).freeze()
    with torch.inference_mode():
        for x in (torch.ones(2), torch.ones(2), torch.zeros(2)):
            got = compiled(x)
            assert_same(got[0], x * 2)
            assert got[1:] == model(x)[1:]
    assert compiled.frozen == 1


class Stores(nn.Module):
    """Keeps a reference to its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x * 2


class Flags(nn.Module):
    """Sets an attribute that later calls never read."""

    used = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = True
        return x * 2


class Counting(nn.Module):
    """Python state that changes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Remembering(nn.Module):
    """A tensor attribute that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.last + x
        return self.last * 2


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Stores, lambda m: m.last.clone()),
        (Appends, lambda m: len(m.seen)),
        (Flags, lambda m: m.used),
        (Counting, lambda m: m.calls),
        (Remembering, lambda m: m.last.clone()),
    ],
)
def test_what_a_model_keeps_is_kept_at_each_call(kind: type[nn.Module], state: Callable[[Any], Any]) -> None:
    model, twin = kind(), kind()
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for n in range(4):
            x = torch.full((3,), float(n))
            if kind is Flags:
                model.used = twin.used = False
            assert_same(compiled(x), twin(x))
            assert_same(state(model), state(twin))
    assert compiled.frozen == 0
    assert any("keeps state" in reason for reason in compiled.guarded_reasons)
    assert compiled.report.cache.traces == compiled.report.summary.graphs <= 4


def test_what_is_printed_is_printed_at_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    def printing(x: torch.Tensor) -> torch.Tensor:
        print("called")
        return x * 2

    compiled = tov.compile(printing).freeze()
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.ones(2))
    assert capsys.readouterr().out.count("called") == 3 and compiled.frozen == 0


class Box:
    value: Any = None


BOX = Box()


@pytest.mark.parametrize("puts_back", [True, False])
def test_what_is_set_and_set_back_is_no_state(puts_back: bool) -> None:
    """transformers' models do this to a global."""
    BOX.value = None

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            BOX.value = 3
            y = x * BOX.value
            if puts_back:
                BOX.value = None
            return y

    compiled = tov.compile(Model()).freeze()
    with torch.no_grad():
        for _ in range(3):
            BOX.value = None
            assert_same(compiled(torch.ones(2)), torch.full((2,), 3.0))
            assert (BOX.value is None) == puts_back
    assert compiled.frozen == int(puts_back)


CALLS: list[int] = []


@pytest.mark.parametrize("place", ["default", "global"])
def test_mutable_defaults_and_globals_are_state(place: str) -> None:
    CALLS.clear()

    def of_default(x: torch.Tensor, calls: list[int] = []) -> torch.Tensor:  # noqa: B006
        calls.append(1)
        return x * 2

    def of_global(x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return x * 2

    counting, seen = (of_default, of_default.__defaults__[0]) if place == "default" else (of_global, CALLS)
    compiled = tov.compile(counting).freeze()
    with torch.no_grad():
        for _ in range(4):
            compiled(torch.ones(2))
    assert compiled.frozen == 0
    assert len(seen) == 4


@pytest.mark.parametrize("draw", [lambda: random.randint(0, 1), random.random, lambda: float(np.random.rand())])
def test_random_numbers_of_python_are_drawn_anew(draw: Callable[[], float]) -> None:
    compiled = tov.compile(lambda x: x * draw()).freeze()
    with torch.no_grad():
        for seed in (1, 1, 1, 2, 3):
            random.seed(seed), np.random.seed(seed)
            expected = draw()
            random.seed(seed), np.random.seed(seed)
            assert_same(compiled(torch.ones(2)), torch.ones(2) * expected)
    assert compiled.frozen == 0


@pytest.mark.parametrize("pre", [True, False])
def test_a_hook_runs_at_each_call(pre: bool) -> None:
    model, calls = nn.Linear(3, 3).eval(), []
    if pre:
        model.register_forward_pre_hook(lambda module, args: calls.append(1))
    else:
        model.register_forward_hook(lambda module, args, out: calls.append(float(out.sum())))
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for _ in range(4):
            compiled(torch.ones(2, 3))
    assert len(calls) == 4 and compiled.frozen == 0


def test_a_hook_that_only_computes_is_part_of_the_graph() -> None:
    model = nn.Linear(3, 3).eval()
    model.register_forward_hook(lambda module, args, out: out * 2)
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3)
            assert_same(compiled(x), model(x))
    assert compiled.frozen == 1


def test_a_tensor_of_somebody_else_that_changes() -> None:
    """The capture does not reveal the change; the second call does."""
    box = {"scale": torch.ones(1)}
    compiled = tov.compile(lambda x: x * box["scale"]).freeze()
    with torch.no_grad():
        for n in range(1, 4):
            box["scale"] = torch.full((1,), float(n))
            assert_same(compiled(torch.ones(2)), torch.full((2,), float(n)))
    assert compiled.frozen == 0


def test_what_is_one_graph_is_traced_once() -> None:
    compiled = tov.compile(nn.Linear(3, 3).eval()).freeze()
    with torch.no_grad():
        for batch in (1, 2, 1, 2, 1, 2):
            compiled(torch.randn(batch, 3))
    assert compiled.frozen == 2
    assert compiled.report.cache.traces == compiled.report.summary.graphs == 2
    assert not compiled.report.fallbacks


def test_graph_breaks_are_counted_as_without_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchserve_openvino.backend.capture import whole

    tries = []
    real = whole.why_not_whole
    monkeypatch.setattr(whole, "why_not_whole", lambda error: tries.append(error) or real(error))

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return x + 1

    found = []
    for freezes in (False, True):
        torch.compiler.reset()
        compiled = tov.compile(broken)
        if freezes:
            compiled.freeze()
        with torch.no_grad():
            for batch in (1, 2, 3, 1, 2, 3):
                x = torch.randn(batch, 3)
                assert_same(compiled(x), broken(x))
        summary = compiled.report.summary
        counts = (summary.graphs, summary.graph_breaks, summary.recompiles, compiled.report.cache.traces)
        found.append((counts, compiled.report.fallback_counts()))
    assert found[0] == found[1]
    # Signatures that differ only in sizes are not tried again.
    assert len(tries) == 1


def test_an_error_of_the_caller_does_not_keep_others_guarded() -> None:
    model = nn.Linear(3, 3).eval()
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            compiled(torch.randn(2, 5))
        for _ in range(3):
            x = torch.randn(2, 3)
            assert_same(compiled(x), model(x))
    assert compiled.frozen == 1


def test_where_names_the_users_code() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    compiled = tov.compile(model, options={"disabled_ops": ["aten.relu"]}).freeze()
    with torch.no_grad():
        for batch in (1, 2):
            compiled(torch.randn(batch, 3))
    report = compiled.report.to_dict()
    places = [each["where"] for name in ("graphs", "fallbacks", "recompiles") for each in report[name]]
    assert len(places) >= 4 and not any("torchserve_openvino" in place for place in places), places
