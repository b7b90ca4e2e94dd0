"""The comparison with eager."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.verify import EagerAnswers, compare

BATCH = [Case("batch 2", ((torch.tensor([[1.0, 2.0], [3.0, -1.0]]),), {}))]


def run(compiled, eager=lambda x: x, **section):
    return compare(compiled, EagerAnswers(eager), BATCH, Judge("f32", VerifySection(**section)), poisoned=nullcontext)


def test_figures() -> None:
    same = run(lambda x: x * 2, lambda x: x * 2)
    assert same["passed"] and same["max_abs"] == 0 and same["cosine"] == pytest.approx(1)
    assert same["top1_agreement"] == 1 and same["problems"] == []
    off = run(lambda x: x * 2 + 0.5, lambda x: x * 2)
    assert not off["passed"] and off["max_abs"] == pytest.approx(0.5) and "differs by 0.5" in off["problems"][0]
    assert run(lambda x: x + 0.5, max_abs=0.6)["passed"]
    flipped = run(lambda x: -x, max_abs=100.0)
    assert flipped["top1_agreement"] == 0.0 and flipped["cosine"] == pytest.approx(-1)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 50.0])
def test_the_tolerance_follows_the_largest_value_down_too(scale: float) -> None:
    limit = 3 * max(scale, 0.01 / 3) * 1e-3
    assert run(lambda x: x * scale + 0.9 * limit, lambda x: x * scale)["passed"]
    assert not run(lambda x: x * scale + 1.1 * limit, lambda x: x * scale)["passed"]


def test_a_model_in_half_precision_is_held_to_its_own_type() -> None:
    assert run(lambda x: (x * 1.01).half(), lambda x: x.half())["passed"]
    assert not run(lambda x: (x * 1.03).half(), lambda x: x.half())["passed"]


def test_each_output_has_its_own_figures() -> None:
    result = run(lambda x: (x, x + 0.25, x[:, 0]), lambda x: (x, x, x[:, 0]), max_abs=0.3)
    assert result["passed"] and [round(o["max_abs"], 3) for o in result["outputs"]] == [0, 0.25, 0]
    assert result["max_abs"] == pytest.approx(0.25) and result["outputs"][2]["top1_agreement"] is None


@pytest.mark.parametrize(
    ("section", "word"), [({"min_cosine": 0.99}, "min_cosine"), ({"min_top1": 1.0}, "min_top1 100.0%")]
)
def test_cosine_and_top1_have_limits_of_their_own(section, word) -> None:
    result = run(lambda x: -x, max_abs=100.0, **section)
    assert not result["passed"] and word in result["problems"][0]


class Counting(nn.Module):
    """Keeps how often it was called, as some memories do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


class Returning(Counting):
    """Answers with its state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x.sum()
        return self.calls


class Replacing(nn.Module):
    """Keeps the same in TorchScript, by another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x + self.calls


CHANGING = [
    lambda x: x.sub_(0.5) * 2,
    lambda x: x + torch.rand_like(x),
    Counting(),
    Returning(),
    torch.jit.script(Counting()),
    torch.jit.script(Replacing()),
]


@pytest.mark.parametrize("model", CHANGING)
def test_what_one_run_changes_the_other_does_not_see(model) -> None:
    sample, generator = BATCH[0].inputs[0][0].clone(), torch.get_rng_state()
    answers = EagerAnswers(model)
    for _ in range(2):
        result = compare(model, answers, BATCH, Judge("f32", VerifySection()), poisoned=nullcontext)
        assert result["passed"] and result["max_abs"] == 0
    assert torch.equal(BATCH[0].inputs[0][0], sample) and torch.equal(torch.get_rng_state(), generator)
    assert not isinstance(model, nn.Module) or model.calls.item() == 0


def test_answers_without_anything_to_compare_count_as_not_compared() -> None:
    result = run(lambda x: None, lambda x: None)
    assert result["value_sets"]["compared"] == 0 and "nothing" not in result["problems"]
    assert "no tensors, numbers or texts" in result["value_sets"]["why_skipped"][0]
    assert not run(lambda x: "dog", lambda x: "cat")["passed"]


def test_nan_shape_type_and_count() -> None:
    assert not run(lambda x: x / 0 * 0, max_abs=1e9)["passed"]
    assert not run(lambda x: x[:1], max_abs=1e9)["passed"]
    assert not run(lambda x: x.half(), max_abs=1e9)["passed"]
    assert not run(lambda x: (x, x), max_abs=1e9)["passed"]
    assert run(lambda x: x / 0, lambda x: x / 0)["passed"]


def test_complex_outputs_are_compared() -> None:
    assert run(lambda x: torch.complex(x, x), lambda x: torch.complex(x, x))["passed"]
    assert not run(lambda x: torch.complex(x, -x), lambda x: torch.complex(x, x))["passed"]
