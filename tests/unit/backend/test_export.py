"""The backend export: torch.export instead of Dynamo."""

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_models import MODELS, Attention, Attributes, Branch, Counting, inputs, mlp
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.errors import WeightsReleasedError


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_eagers_for_every_batch(name: str, dynamic: bool) -> None:
    model = MODELS[name]()
    compiled = tov.compile(model, backend="export", dynamic=dynamic, options={"min_partition_us": 0})
    for count, batch in enumerate((2, 3, 7), 1):
        left = {"unsupported_op": count} if name == "odd" else None
        check(model, compiled=compiled, coverage=None, fallbacks=left, **inputs(model, batch))
    summary = compiled.report.summary
    assert summary.graphs == 3 and (name == "odd" or summary.coverage == 1.0)
    notes = compiled.report.to_dict()["notes"]
    assert any("one graph for each shape" in note for note in notes) == dynamic


def test_autocast_makes_another_graph() -> None:
    model, x = mlp(), torch.randn(3, 6)
    compiled = tov.compile(model, backend="export")
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(x), model(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_same(compiled(x), model(x))
    assert compiled.report.summary.graphs == 2


def test_keywords_in_any_order_and_none() -> None:
    model = Attention().eval()
    compiled = tov.compile(model, backend="export")
    ids, mask = torch.randint(0, 20, (2, 5)), torch.randn(2, 1, 5, 5)
    with torch.inference_mode():
        for kwargs in ({"mask": mask, "input": ids}, {"input": ids, "mask": mask}, {"input": ids, "mask": None}):
            assert_same(compiled(**kwargs), model(**kwargs))
        assert_same(compiled(ids, mask), model(ids, mask))


def test_what_can_not_be_exported_runs_in_eager_and_is_counted() -> None:
    compiled = tov.compile(Branch().eval(), backend="export")
    with torch.inference_mode():
        for x in (torch.ones(2, 4), -torch.ones(2, 4)):
            assert_same(compiled(x), Branch()(x))
    (fallback,) = compiled.report.fallbacks
    assert (fallback.kind, fallback.op, fallback.count) == ("conversion_failed", "whole model", 2)
    assert "data-dependent" in fallback.reason
    assert compiled.report.summary.coverage == 0.0


@pytest.mark.parametrize(
    ("prepare", "mode", "reason"),
    [
        (lambda model: model.train(), torch.no_grad, "training mode"),
        (lambda model: model, torch.enable_grad, "gradients are recorded"),
    ],
)
def test_training_is_left_to_eager(prepare: Callable[..., Any], mode: Callable[[], Any], reason: str) -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    compiled = tov.compile(model, backend="export")
    with mode():
        answer = compiled(torch.randn(3, 4))
    assert answer.requires_grad == (mode is torch.enable_grad)
    assert reason in compiled.report.fallbacks[0].reason


def test_a_function_is_left_to_eager() -> None:
    compiled = tov.compile(lambda x: x * 2, backend="export")
    assert_same(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert "not functions" in compiled.report.fallbacks[0].reason


def test_an_object_as_input_is_left_to_eager() -> None:
    class Taking(nn.Module):
        def forward(self, x: torch.Tensor, what: object) -> torch.Tensor:
            return x * 2

    compiled = tov.compile(Taking().eval(), backend="export")
    assert_same(compiled(torch.ones(2), object()), torch.full((2,), 2.0))
    assert "input of type object" in compiled.report.fallbacks[0].reason


def _set(name: str, value: Any) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.last.weight.mul_(2),
    "load_state_dict": lambda model: model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict(
        {k: v.clone() + 1 for k, v in model.state_dict().items()}, assign=True
    ),
    "data": lambda model: model.last.weight.data.fill_(0.5),
    "number": _set("scale", 5.0),
    "tensor attribute": _set("shift", torch.full((4,), 3.0)),
    "its content": lambda model: model.shift.add_(1),
    "list": lambda model: model.items.__setitem__(0, torch.full((4,), 7.0)),
    "list's content": lambda model: model.items[0].mul_(2),
    "module": _set("last", nn.Linear(4, 4)),
    "parameter": lambda model: setattr(model.last, "weight", nn.Parameter(torch.ones(4, 4))),
    "type": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


def test_no_change_of_the_model_is_missed() -> None:
    model = Attributes().eval()
    other = copy.deepcopy(model)
    compiled = tov.compile(model, backend="export")
    x = torch.randn(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        for name, change in CHANGES.items():
            with torch.no_grad():
                change(model), change(other)
            with mode():
                got, expected = compiled(x), other(x)
                assert torch.allclose(got, expected, rtol=1e-4), name
    assert compiled.report.fallback_counts() == {}


def test_tied_weights_that_are_untied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[1].weight = model[0].weight  # type: ignore[union-attr, assignment]
    compiled = tov.compile(model, backend="export")
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
        model[1].weight = nn.Parameter(torch.ones(4, 4))  # type: ignore[union-attr, assignment]
        assert_same(compiled(x), model(x))


def test_an_optimizer_step_is_seen() -> None:
    model = mlp()
    compiled = tov.compile(model, backend="export")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 6)
    for _ in range(3):
        with torch.inference_mode():
            assert_same(compiled(x), model(x))
        model(x).square().sum().backward()
        optimizer.step()


def test_a_buffer_that_the_model_writes_to() -> None:
    model, other = Counting().eval(), Counting().eval()
    compiled = tov.compile(model, backend="export")
    x = torch.randn(2, 4)
    with torch.inference_mode():
        for _ in range(3):
            assert_same(compiled(x), other(x))
    assert model.seen.item() == 3 and compiled.report.fallback_counts() == {}
    assert compiled.freeze() is compiled
    with torch.inference_mode():
        for _ in range(3):
            assert_same(compiled(x), other(x))
    assert compiled.frozen == 0


def test_an_input_that_the_model_writes_to() -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return x + 1

    compiled = tov.compile(Writing().eval(), backend="export")
    x, y = torch.ones(3), torch.ones(3)
    with torch.no_grad():
        assert_same(compiled(x), Writing()(y))
    assert_same(x, y)


def test_a_counter_of_plain_python_is_not_lost() -> None:
    class Calls(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    model = Calls().eval()
    compiled = tov.compile(model, backend="export")
    x = torch.ones(2)
    with torch.no_grad():
        compiled(x)
        first = model.calls
        assert_same(compiled(x), x * (first + 1))
        assert_same(compiled(x), x * (first + 2))
    assert "changes Python state" in compiled.report.fallbacks[0].reason


def test_large_and_nested_containers_are_no_state() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.order = {i: float(i) for i in range(100)}, collections.deque([1.0, 2.0])
            self.nested, self.long, self.kinds = [[[[[[1.0]]]]]], list(range(200)), {"a", "b"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[3] + self.order[1] + self.nested[0][0][0][0][0][0] + self.long[150] + len(self.kinds)

    model = Holding().eval()
    before = dict(vars(model))
    compiled = tov.compile(model, backend="export")
    with torch.inference_mode():
        for _ in range(2):
            assert_same(compiled(torch.ones(2)), model(torch.ones(2)))
    assert compiled.report.fallback_counts() == {} and compiled.report.summary.coverage == 1.0
    # The same objects, since others may refer to them.
    assert all(vars(model)[name] is value for name, value in before.items())


def test_a_change_in_a_large_container_is_state() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = list(range(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1)
            return x * len(self.seen)

    model = Growing().eval()
    compiled = tov.compile(model, backend="export")
    with torch.inference_mode():
        for n in range(3):
            assert_same(compiled(torch.ones(2)), torch.full((2,), 101.0 + n))
    assert "changes Python state (seen)" in compiled.report.fallbacks[0].reason


def test_frozen_calls_run_without_looking_at_the_module() -> None:
    model = mlp()
    compiled = compile_with(model, CompileSpec(backend="export", own_weights=True)).freeze()
    x = torch.randn(2, 6)
    with torch.inference_mode():
        expected = model(x)
        for _ in range(3):
            assert_same(compiled(x), expected)
        assert compiled.frozen == 1
        compiled.release_weights()
        assert_same(compiled(x), expected)
        with pytest.raises(WeightsReleasedError):
            compiled(torch.randn(3, 6))


def test_a_model_that_fell_back_keeps_its_weights() -> None:
    compiled = compile_with(Branch().eval(), CompileSpec(backend="export", own_weights=True)).freeze()
    with torch.inference_mode():
        compiled(torch.ones(2, 4))
    with pytest.raises(WeightsReleasedError, match="calls run guarded"):
        compiled.release_weights()


def test_signatures_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchserve_openvino.backend.capture.export.MAX_SIGNATURES", 2)
    model = nn.Linear(4, 2).eval()
    compiled = tov.compile(model, backend="export")
    with torch.inference_mode():
        for batch in (1, 2, 3, 1):
            x = torch.randn(batch, 4)
            assert_same(compiled(x), model(x))
    (fallback,) = compiled.report.fallbacks
    assert "more than 2 input signatures" in fallback.reason and fallback.count == 1
