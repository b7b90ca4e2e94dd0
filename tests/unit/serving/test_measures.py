"""`precision: auto` judges narrower precisions by what a task's users read, with bounds that the YAML can set."""

import math
from typing import Any

import pytest
import torch
from serving_worker import WARMUP, save_weights

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving import precision, precision_trial
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.measures import (
    Cosine,
    Detections,
    Independent,
    Measure,
    Measurement,
    Relative,
    Similarities,
    Top1,
)
from torchserve_openvino.tasks.tensor import TensorHandler


class Classifier(TensorHandler):
    """A task whose answers are classes."""

    def measure(self) -> Measure | None:
        return Top1()


@pytest.fixture
def bf16_is_faster(monkeypatch) -> None:
    """bf16 is the only candidate beside f32, and wins if it passes."""
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "BF16", "INT8"])
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: "needs a CPU with AMX.")
    monkeypatch.setattr(precision, "timed_pairs", lambda first, second, seconds: [1.5] * 20)


def started(made: Any, kind: type[TensorHandler]) -> dict:
    handler = kind()
    handler.initialize(made.context)
    return handler.describe_handle()


def configured(**verify: Any) -> dict:
    return {"handler": {"openvino": {"warmup": WARMUP, "precision": "auto", "verify": verify}}}


LOGITS = torch.tensor([[4.0, 1.0, 0.0], [0.30, 0.29, 0.0]])


@pytest.mark.parametrize(
    ("measure", "got", "expected", "problem"),
    [
        (Top1(), LOGITS + 0.01, LOGITS, ""),
        (Top1(), LOGITS + 5.0, LOGITS, ""),
        (Top1(), LOGITS.flip(-1), LOGITS, "probability that differs"),
        # Eager's lead is within the bound, so that either class may be first.
        (Top1(), torch.tensor([[0.29, 0.30, 0.0]]), LOGITS[1:], ""),
        (Top1(0.0001), torch.tensor([[0.29, 0.30, 0.0]]), LOGITS[1:], "probability that differs"),
        (Top1(), LOGITS.softmax(-1).flip(-1), LOGITS.softmax(-1), "probability that differs by 0.9"),
        (Top1(), LOGITS * float("nan"), LOGITS, "NaN at different positions"),
        (Top1(axis=1), torch.zeros(1, 3, 2, 2), torch.eye(3)[:1, :, None, None].expand(1, 3, 2, 2) * 9, "differs"),
        (Cosine(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]]), ""),
        # One bad row among good ones counts.
        (Cosine(), torch.tensor([[1.0, 0.0]] * 9 + [[1.0, 0.1]]), torch.tensor([[1.0, 0.0]] * 10), "row of cosine"),
        (Cosine(), torch.full((1, 2), float("nan")), torch.ones(1, 2), "row of cosine nan"),
        (Relative(), torch.full((2, 2), 1.005), torch.ones(2, 2), ""),
        (Relative(), torch.full((2, 2), 1.02), torch.ones(2, 2), "differs by 0.02"),
        (Relative(), torch.ones(2, 2), torch.zeros(2, 2), "differs by inf"),
        (Top1(), torch.zeros(0, 3), torch.zeros(0, 3), ""),
    ],
)
def test_a_measure_judges_what_users_read(measure, got, expected, problem) -> None:
    worst, said = measure.judge_output(got, expected)
    assert problem in said and bool(said) == bool(problem)
    assert (worst is None) == (not expected.numel())


def test_the_worst_figure_of_an_answer_is_that_of_its_worst_output() -> None:
    good, bad = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]])
    judged = Cosine().judge([good, bad, good], [good, good, good])
    assert judged.worst == pytest.approx(1 / 1.01**0.5)
    assert len(judged.problems) == 1 and ", output 1: " in judged.problems[0]
    nan = torch.full((1, 2), float("nan"))
    assert math.isnan(Cosine().judge([bad, nan], [good, good]).worst)
    assert math.isnan(Cosine().judge([nan, bad], [good, good]).worst)
    assert Top1().judge([good * 2, good], [good, good]).worst == pytest.approx(0.119203, rel=1e-4)
    # Integers and outputs of another shape are not judged here.
    assert Relative().judge([good.int(), good[0]], [good.int(), good]) == Measurement()


BOXES = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.2, 0.3, 0.1, 0.1], [0.8, 0.8, 0.1, 0.3]]])
# Two objects of classes 0 and 1, and a query without one; the last class is "no object".
OBJECTS = torch.tensor([[[6.0, 0.0, 0.0], [0.0, 5.0, 0.0], [-3.0, -3.0, 6.0]]])
SHIFT = torch.tensor([0.05, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("logits", "boxes", "wrong"),
    [
        (OBJECTS + 0.01, BOXES + 0.001, ""),
        # Queries may come in another order, as those that a first stage of the model selects.
        (OBJECTS.flip(1), BOXES.flip(1), ""),
        (OBJECTS, BOXES + SHIFT, "lacks 2 of eager's objects, and has 2 others"),
        # The place of what is no object does not matter.
        (OBJECTS, torch.cat([BOXES[:, :2], BOXES[:, 2:] + SHIFT], 1), ""),
        (OBJECTS.roll(1, -1), BOXES, "lacks 2"),
        (
            OBJECTS - torch.tensor([[[3.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]]),
            BOXES,
            "lacks 1 of eager's objects, and has 1",
        ),
        (OBJECTS * float("nan"), BOXES, "lacks 3"),
        (torch.zeros_like(OBJECTS) + OBJECTS[:, :1], BOXES, "has 2 others"),
    ],
)
def test_detections_are_judged_by_label_place_and_score(logits, boxes, wrong) -> None:
    said = Detections(has_no_object=True).judge([logits, boxes], [OBJECTS, BOXES]).problems
    assert wrong in "".join(said) and bool(said) == bool(wrong)


def test_detections_of_sigmoids_have_no_class_for_nothing() -> None:
    sigmoids = OBJECTS - 3.0
    assert Detections().judge([sigmoids, BOXES], [sigmoids, BOXES]) == Measurement(0.0, (), frozenset({0, 1}))
    judged = Detections().judge([sigmoids - torch.eye(3)[2], BOXES], [sigmoids, BOXES])
    assert "image 0: lacks 1" in judged.problems[0]
    # The score of the third object, a sigmoid of 3, becomes that of 2.
    assert judged.worst == pytest.approx(torch.tensor([3.0, 2.0]).sigmoid().diff().abs().item())


def test_detections_without_any_object_have_no_figure() -> None:
    assert Detections().judge([OBJECTS - 20.0, BOXES], [OBJECTS - 20.0, BOXES]) == Measurement()


@pytest.mark.parametrize(
    ("got", "expected", "problem"),
    [
        ([[1.0], [0.5]], [[1.01], [0.5]], ""),
        ([[1.0], [0.5]], [[1.2], [0.5]], "score that differs"),
        # Both scores are almost 1 so that only the order shows the difference.
        ([[9.0], [9.5]], [[9.5], [9.0]], "orders 1 pair"),
        ([[9.0], [9.02]], [[9.02], [9.0]], ""),
        ([[float("nan")], [0.0]], [[0.0], [0.0]], "differs by nan"),
    ],
)
def test_a_ranking_keeps_its_clear_order_and_its_scores(got, expected, problem) -> None:
    _, said = Independent().judge_output(torch.tensor(got), torch.tensor(expected))
    assert problem in said and bool(said) == bool(problem)


def test_vectors_are_judged_by_the_probabilities_of_labels() -> None:
    torch.manual_seed(0)
    vectors, labels = (torch.nn.functional.normalize(torch.randn(n, 512), dim=-1) for n in (4, 6))
    # The cosine with eager's vector is 0.9998, which a bound on the cosine would accept.
    moved = torch.nn.functional.normalize(vectors + 0.02 * labels[0], dim=-1)
    assert not Cosine().judge_output(moved, vectors)[1]
    assert "probability" in Similarities(references=labels, scale=100.0).judge_output(moved, vectors)[1]
    assert not Similarities(references=labels, scale=1.0).judge_output(moved, vectors)[1]
    assert "score" in Similarities(references=labels, scale=100.0, independent=True).judge_output(moved, vectors)[1]
    assert not Similarities(references=labels, scale=100.0).judge_output(vectors + 1e-5, vectors)[1]


FLAT = torch.tensor([[0.010, 0.012, 0.011]])


def test_logits_near_zero_are_judged_by_their_probabilities() -> None:
    moved, section = FLAT + torch.tensor([[0.002, -0.002, 0.0]]), VerifySection()
    assert Judge("bf16", section).judge([moved], [FLAT]).problems
    for must_meet in (True, False):
        verdict = Judge("bf16", section, Top1(), must_meet).judge([moved], [FLAT])
        assert not verdict.problems and 0 < verdict.measured < 0.001
        # What the user sets counts, and what the measure says nothing about.
        assert Judge("bf16", VerifySection(max_abs=1e-4), Top1(), must_meet).judge([moved], [FLAT]).problems
        assert Judge("bf16", VerifySection(min_top1=1.0), Top1(), must_meet).judge([moved], [FLAT]).problems
        second = Judge("bf16", section, Top1(), must_meet).judge([moved, moved], [FLAT, FLAT])
        assert len(second.problems) == 1 and "output 1" in second.problems[0]
        # A mean hides a single value that is far away.
        spike = torch.zeros(1, 1000).index_fill(1, torch.tensor([7]), 5.0)
        assert Judge("bf16", section, Relative(), must_meet).judge([spike + 1], [torch.ones(1, 1000)]).problems


def test_a_stated_precision_need_not_meet_the_measure_if_its_numbers_are_near() -> None:
    near = LOGITS + torch.tensor([0.0, 0.2, 0.0])
    chosen, stated = (Judge("bf16", VerifySection(), Top1(), must).judge([near], [LOGITS]) for must in (True, False))
    assert "probability that differs" in chosen.problems[0] and not stated.problems
    far = Judge("bf16", VerifySection(), Top1(), False).judge([LOGITS.flip(-1)], [LOGITS])
    assert "differs by 4" in far.problems[0]


def test_the_chosen_precision_meets_the_tasks_measure_and_the_report_says_so(archive, bf16_is_faster) -> None:
    report = started(archive(configured(), weights=save_weights), Classifier)
    choice = report["config"]["precision_choice"]
    assert choice["chosen"] == "bf16" and report["verify"]["passed"]
    for stated in (choice["tried"]["bf16"]["measure"], report["verify"]["measure"]):
        assert stated["name"] == "probability" and stated["bound"] == 0.02 and 0 < stated["worst"] <= 0.02
    assert choice["tried"]["f32"]["measure"] is None


def test_a_precision_that_misses_the_measure_is_not_chosen_and_the_reason_is_kept(archive, bf16_is_faster) -> None:
    made = archive(configured(measure={"probability": 1e-9}), weights=save_weights)
    report = started(made, Classifier)
    choice = report["config"]["precision_choice"]
    assert choice["chosen"] == "f32" and report["summary"]["precision"] == "f32" and report["verify"]["passed"]
    assert "verify.measure.probability 1e-09" in choice["tried"]["bf16"]["problem"]


def test_a_decision_is_made_again_when_a_bound_changes(archive, bf16_is_faster, tmp_path) -> None:
    pt2 = {"compile": {"backend": "openvino", "options": {"model_caching": True, "cache_dir": str(tmp_path / "cache")}}}
    chosen = [
        started(archive({"pt2": pt2, **configured(**verify)}, weights=save_weights), Classifier)["config"][
            "precision_choice"
        ]["chosen"]
        for verify in ({}, {"measure": {"probability": 1e-9}}, {"max_abs": 1e-9, "on_violation": "warn"})
    ]
    assert chosen == ["bf16", "f32", "f32"]


@pytest.mark.parametrize(
    ("kind", "measure", "message"),
    [
        (Classifier, {"cosine": 0.99}, "verify.measure.cosine.*measured by probability"),
        (TensorHandler, {"cosine": 0.99}, "verify.measure.cosine.*compared by numbers"),
    ],
)
def test_a_bound_of_another_task_is_refused_by_name(archive, kind, measure, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        started(archive(configured(measure=measure), weights=save_weights), kind)


def test_the_smallest_and_the_largest_shape_are_timed_and_all_verified(archive, bf16_is_faster, monkeypatch) -> None:
    sizes: list[int] = []

    def timed(first, second, seconds) -> list[float]:
        with monkeypatch.context() as patched:
            patched.setattr(
                precision_trial, "run_case", lambda compiled, served, case: sizes.append(len(case.inputs[0][0]))
            )
            second()
        return [1.5] * 20

    monkeypatch.setattr(precision, "timed_pairs", timed)
    yaml = configured()
    yaml["handler"]["openvino"]["batching"] = {"buckets": [1, 2, 4, 8]}
    report = started(archive(yaml, weights=save_weights, batch_size=8), Classifier)
    assert sizes == [1, 8] and report["verify"]["cases"] == 4
