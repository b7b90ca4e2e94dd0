"""Verification compares several sets of values that no compilation saw, with poisoned output memory."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import leave_unwritten, stick
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.serving.shapes.input_spec import InputSpec, Signature
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs
from torchserve_openvino.serving.shapes.value_sets import richest, sample_sets, value_sets
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.verify import EagerAnswers, compare

X = InputSpec("x", False, (4,), torch.float32)
BOUNDED = InputSpec("x", False, (4,), torch.float32, low=-2.0, high=3.0)
IDS = InputSpec("ids", False, ("length",), torch.int64, low=0, high=50)
MASK = InputSpec("mask", False, ("length",), torch.int64, mask=True)


def declared(*specs: InputSpec) -> DeclaredInputs:
    return DeclaredInputs(specs, [], {"length": [2, 6]})


def case(*specs: InputSpec, batch: int = 3, rich: bool = True) -> Case:
    inputs, signature = declared(*specs), Signature(batch, {"length": 6})
    return Case("shape", inputs.make(signature), others=lambda: value_sets(inputs, signature, rich=rich))


def run(compiled: Any, eager: Any, *cases: Case, **section: Any) -> dict[str, Any]:
    poisoned = compiled.poisoned if isinstance(compiled, tov.CompiledModule) else nullcontext
    return compare(compiled, EagerAnswers(eager), cases, Judge("f32", VerifySection(**section)), poisoned=poisoned)


def kinds(*specs: InputSpec, rich: bool = True) -> dict[str, tuple[Any, ...]]:
    return {each.name: each.inputs[0] for each in case(*specs, rich=rich).others()}


def test_each_shape_gets_two_sets_and_the_extreme_shapes_all() -> None:
    assert list(kinds(X, rich=False)) == ["random", "random again"]
    assert list(kinds(IDS, MASK, rich=False)) == ["random", "padded right"]
    assert list(kinds(X)) == ["random", "random again", "zeros"]
    assert list(kinds(BOUNDED)) == ["random", "random again", "zeros", "least", "greatest"]
    # Zero is also the least declared value.
    both = ["random", "padded right", "random again", "padded left", "an empty row", "zeros", "greatest"]
    assert list(kinds(IDS, MASK)) == both
    signatures = [Signature(b, {"length": n}) for b in (1, 2, 4) for n in (2, 6)]
    assert richest(signatures) == {"batch 1, length 2", "batch 4, length 6"}


def test_values_lie_within_what_is_declared_and_none_is_warm_ups() -> None:
    first = declared(BOUNDED).make(Signature(3, {"length": 6}))[0]
    for name, (x,) in kinds(BOUNDED).items():
        assert x.shape == (3, 4) and x.min() >= -2 and x.max() <= 3, name
        assert not torch.equal(x, first[0])
    assert kinds(BOUNDED)["least"][0].unique().tolist() == [-2] and kinds(BOUNDED)["greatest"][0].max() == 3
    sets = kinds(IDS, MASK)
    for ids, _ in sets.values():
        assert ids.min() >= 0 and ids.max() <= 49
    assert sets["greatest"][0].unique().tolist() == [49]
    positive = InputSpec("x", False, (4,), torch.uint8, low=5, high=256)
    assert "zeros" not in kinds(positive) and kinds(positive)["greatest"][0].unique().tolist() == [255]
    assert kinds(InputSpec("b", False, (4,), torch.bool))["greatest"][0].all()


def test_masks_of_all_kinds() -> None:
    sets = {name: mask for name, (_, mask) in kinds(IDS, MASK).items()}
    assert sets["random"].all() and sets["zeros"].all()
    assert sets["padded right"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert sets["padded left"].tolist() == [row[::-1] for row in sets["padded right"].tolist()]
    assert sets["an empty row"].sum(1).tolist() == [6, 6, 0]
    square = InputSpec("mask", False, ("length", "length"), torch.bool, mask=True)
    assert kinds(IDS, square)["padded right"][1].shape == (3, 6, 6)


def test_a_sample_is_verified_in_another_order() -> None:
    (other,) = sample_sets(((torch.arange(4.0),), {}))
    assert other.inputs[0][0].tolist() == [3, 2, 1, 0]
    assert sample_sets(((torch.ones(4),), {})) == []


FAULTS = {
    "a mask taken for ones": (lambda ids, mask: ids.float(), lambda ids, mask: ids * mask.float(), (IDS, MASK)),
    "wrong at zero": (lambda x: x.sign() + (x == 0), lambda x: x.sign(), (X,)),
    "wrong at the end": (lambda ids, mask: ids % 49, lambda ids, mask: ids, (IDS, MASK)),
    "wrong at the least": (lambda x: torch.where(x == -2, 0.0, x), lambda x: x, (BOUNDED,)),
    "right padding only": (
        lambda ids, mask: ids * (torch.arange(6) < mask.sum(1, keepdim=True)),
        lambda ids, mask: ids * mask,
        (IDS, MASK),
    ),
    "an empty row": (
        lambda ids, mask: ids.float().masked_fill(mask == 0, float("-inf")).softmax(1),
        lambda ids, mask: ids.float().masked_fill(mask == 0, float("-inf")).softmax(1).nan_to_num(),
        (IDS, MASK),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_the_first_values_hide(name: str) -> None:
    compiled, eager, specs = FAULTS[name]
    result = run(compiled, eager, case(*specs))
    assert not result["passed"] and result["problems"][0].startswith("shape, ")
    assert run(eager, eager, case(*specs))["passed"]


def test_the_result_says_what_was_compared_and_what_was_not() -> None:
    def picky(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool((ids == 49).all()):
            raise ValueError("not these")
        if bool((ids == 0).all()):
            return ids * float("nan")
        return (ids * mask).float().masked_fill((mask == 0).all(1, keepdim=True), float("nan"))

    sets = run(picky, picky, case(IDS, MASK))["value_sets"]
    assert (sets["compared"], sets["skipped"], sets["unseen"]) == (4, 3, True)
    assert sets["kinds"] == {"random": 1, "padded right": 1, "random again": 1, "padded left": 1}
    assert sets["why_skipped"] == [
        "shape, an empty row: eager answers NaN",
        "shape, zeros: eager answers NaN everywhere",
        "shape, greatest: eager raises ValueError: not these",
    ]


def test_eager_answers_once_for_all_precisions_and_again_what_is_too_large() -> None:
    calls: list[torch.Tensor] = []
    buffer = torch.zeros(3, 4)

    def eager(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        # The next call overwrites this answer.
        return buffer.copy_(x * 2)

    shape, judge = case(X, rich=False), Judge("f32", VerifySection())
    answers = EagerAnswers(eager)
    results = [
        compare(partial(torch.mul, factor), answers, [shape], judge, poisoned=nullcontext)
        for factor in map(torch.tensor, (2.0, 2.0, 3.0))
    ]
    assert [result["passed"] for result in results] == [True, True, False]
    assert len(calls) == results[0]["value_sets"]["compared"] == 2
    calls.clear()
    too_large = EagerAnswers(eager, most_bytes=buffer.nbytes)
    double = partial(torch.mul, torch.tensor(2.0))
    assert all(compare(double, too_large, [shape], judge, poisoned=nullcontext)["passed"] for _ in range(3))
    assert len(calls) == 1 + 3


def test_calls_of_one_name_have_answers_of_their_own() -> None:
    """A handler may call its model several times for one sample."""
    samples = [Case("sample a.bin", ((torch.arange(4.0) + shift,), {})) for shift in (0, 10)]
    answers = EagerAnswers(lambda x: x * 2)
    for _ in range(2):
        result = compare(lambda x: x * 2, answers, samples, Judge("f32", VerifySection()), poisoned=nullcontext)
        assert result["passed"]


def test_a_shape_whose_other_values_eager_refuses_is_compared_as_recorded() -> None:
    recorded = case(X)

    def eager(x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(x, recorded.inputs[0][0]):
            raise ValueError("only the first")
        return x

    result = run(lambda x: x, eager, recorded)
    assert result["passed"] and result["value_sets"]["unseen"] is False
    assert result["value_sets"]["kinds"] == {"as recorded": 1} and result["value_sets"]["skipped"] == 3
    assert not run(lambda x: x + 1, eager, recorded)["passed"]


def test_a_compiled_model_that_raises_where_eager_answers_is_a_problem() -> None:
    def compiled(x: torch.Tensor) -> torch.Tensor:
        if bool((x == 0).all()):
            raise RuntimeError("the device is gone")
        return x

    result = run(compiled, lambda x: x, case(X))
    assert result["problems"] == ["shape, zeros: raises RuntimeError: the device is gone"]


class Amplifier(nn.Module):
    """On constant planes its answer is nothing but amplified rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv1d(4, 8, 5), nn.Conv1d(8, 8, 5)
        self.norm = nn.InstanceNorm1d(8, eps=1e-14)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.norm(self.first(x))))


def test_rounding_that_eager_shows_as_well_is_no_fault() -> None:
    """For zeros, another summation order changes the answer as much as eager's own rounding does."""
    model = Amplifier().eval()

    def reordered(x: torch.Tensor) -> torch.Tensor:
        return Amplifier().eval().double()(x.double()).float()

    plane = InputSpec("x", False, (4, 33), torch.float32)
    result = run(reordered, model, case(plane))
    assert result["passed"], result["problems"]
    assert result["value_sets"]["why_skipped"] == ["shape, zeros: rounding alone changes eager's answer as much"]
    assert not run(lambda x: reordered(x) + 1e3 * (x == 0).all(), model, case(plane))["passed"]
    assert not run(lambda x: reordered(x) / (x != 0).any(), model, case(plane))["passed"]


def frozen(model: nn.Module, x: torch.Tensor) -> tov.CompiledModule:
    compiled = tov.compile(model, options={"config": {"INFERENCE_PRECISION_HINT": "f32"}}).freeze()
    with torch.inference_mode():
        for _ in range(2):
            compiled(x)
    assert compiled.frozen == 1
    return compiled


def test_unwritten_output_memory_is_detected(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    shape = case(X)
    compiled = frozen(model, shape.inputs[0][0])
    assert run(compiled, model, shape)["passed"]
    leave_unwritten(monkeypatch)
    result = run(compiled, model, shape)
    assert "has NaN at different positions" in result["problems"][0]


def test_a_route_that_answers_with_what_was_recorded_shows(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    shape = case(X)
    compiled = frozen(model, shape.inputs[0][0])
    stick(monkeypatch)
    with torch.inference_mode():
        compiled(shape.inputs[0][0])
    as_before = Case("shape", shape.inputs)
    assert run(compiled, model, as_before)["passed"]
    result = run(compiled, model, shape)
    assert not result["passed"] and "random" in result["problems"][0]
