"""The backend auto: tries every backend and keeps the best."""

import gc

import pytest
import torch
from backend_models import MODELS, Branch, Counting, inputs, mlp
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.config.vocabulary import COMPILING


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_eagers(name: str, freezes: bool) -> None:
    model = MODELS[name]()
    compiled = tov.compile(model, backend="auto")
    early = compiled.report
    if freezes:
        compiled.freeze()
    with torch.inference_mode():
        for batch in (2, 2, 3, 3):
            call = inputs(model, batch)
            assert_same(compiled(**call), model(**call), strides=False)
    choice = early.to_dict()["config"]["backend_choice"]
    assert choice["chosen"] in COMPILING and set(choice["tried"]) == set(COMPILING)
    for facts in choice["tried"].values():
        assert facts["problem"] == "" and facts["milliseconds"] > 0
    assert early.to_dict()["config"]["backend"] == choice["chosen"] == early.backend
    assert early.summary.coverage == max(facts["coverage"] for facts in choice["tried"].values())
    assert compiled.frozen == (2 if freezes else 0)


@pytest.mark.slow
def test_the_losers_are_freed() -> None:
    def partitions() -> int:
        gc.collect()
        return sum(isinstance(item, CompiledPartition) for item in gc.get_objects())

    before = partitions()
    compiled = tov.compile(mlp(), backend="auto")
    with torch.inference_mode():
        compiled(torch.randn(2, 6))
    assert partitions() == before + 1


def test_what_falls_back_loses_to_what_does_not() -> None:
    compiled = tov.compile(Branch().eval(), backend="auto")
    with torch.inference_mode():
        for x in (torch.ones(2, 4), -torch.ones(2, 4)):
            assert_same(compiled(x), Branch()(x))
    choice = compiled.report.to_dict()["config"]["backend_choice"]
    assert choice["chosen"] != "export" and choice["tried"]["export"]["coverage"] == 0.0


def test_a_model_without_a_right_answer_stays_in_eager() -> None:
    calls = [0]

    class Clock(nn.Module):
        """Its result depends on a call count that is kept outside the module."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return x * calls[0]

    compiled = tov.compile(Clock().eval(), backend="auto")
    x = torch.ones(2)
    with torch.inference_mode():
        compiled(x)
        before = calls[0]
        assert_same(compiled(x), x * (before + 1))
    choice = compiled.report.to_dict()["config"]["backend_choice"]
    assert choice["chosen"] == "eager" and all("differs" in facts["problem"] for facts in choice["tried"].values())
    (fallback,) = compiled.report.fallbacks
    assert (fallback.op, fallback.count) == ("whole model", 2) and "no backend gave eager's answer" in fallback.reason


def test_trying_leaves_buffers_inputs_and_the_generator_alone() -> None:
    model, other = Counting().eval(), Counting().eval()
    compiled = tov.compile(model, backend="auto")
    x = torch.randn(2, 4)
    generator = torch.get_rng_state()
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(x), other(x))
    assert model.seen.item() == 3
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_random_model_can_be_compared() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.rand_like(x) + x.relu() * 2

    compiled = tov.compile(Noisy().eval(), backend="auto")
    with torch.inference_mode():
        compiled(torch.randn(2, 4))
    assert compiled.report.to_dict()["config"]["backend_choice"]["chosen"] in COMPILING


def test_eagers_own_error_is_the_callers() -> None:
    compiled = tov.compile(nn.Linear(4, 2).eval(), backend="auto")
    with torch.inference_mode(), pytest.raises(RuntimeError):
        compiled(torch.randn(2, 5))
    with torch.inference_mode():
        assert compiled(torch.randn(2, 4)).shape == (2, 2)


def test_weights_can_be_released() -> None:
    model = mlp()
    compiled = compile_with(model, CompileSpec(backend="auto", own_weights=True)).freeze()
    x = torch.randn(2, 6)
    with torch.inference_mode():
        expected = model(x)
        assert_same(compiled(x), expected)
        assert_same(compiled.release_weights()(x), expected)
    assert compiled.released


class Stream(nn.Module):
    """Keeps state in an attribute, a list, a dictionary, a reassigned buffer, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.items, self.table, self.calls = torch.zeros(1), [torch.zeros(1)], {"h": torch.zeros(1)}, 0
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("written", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.h = self.h + x.sum()
        self.n = self.n + 1
        self.written += 2
        self.items.append(self.h * 2)
        self.table["h"] = self.table["h"] + 1
        return self.h + self.n + self.items[-1] + self.table["h"] + self.written + self.calls


class Decaying(nn.Module):
    """Writes to its weight."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.weight, self.by_data = nn.Parameter(torch.ones(3)), by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_data:
            self.weight.data = self.weight.data * 0.5
        else:
            self.weight.mul_(0.5)
        x.add_(1)
        return x * self.weight


STATEFUL = {"attributes": Stream, "weight": lambda: Decaying(False), "weight.data": lambda: Decaying(True)}


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("backend", ["auto", "export", "openvino"])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_after_a_call_is_that_of_one_call(name: str, backend: str, freezes: bool) -> None:
    model, twin = STATEFUL[name]().eval(), STATEFUL[name]().eval()
    compiled = tov.compile(model, backend=backend)
    if freezes:
        compiled.freeze()
    with torch.no_grad():
        for n in range(4):
            x = torch.full((3,), float(n))
            y = x.clone()
            assert_same(compiled(x), twin(y))
            assert_same(x, y)
            for kept, other in vars(twin).items():
                assert_same(getattr(model, kept), other)
    assert compiled.frozen == 0
    if backend == "export" and name != "weight":
        assert compiled.report.fallback_counts()["conversion_failed"] == 4
