"""`precision: auto` judges narrower precisions by what a task's users read, with bounds that the YAML can set."""

from typing import Any

import pytest
import torch
from serving_worker import WARMUP, save_weights

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving import precision, trial
from torchserve_openvino.serving.verification.measures import Cosine, Measure, Relative, Top1
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
    said = measure.problem(got, expected)
    assert problem in said and bool(said) == bool(problem)


def test_the_chosen_precision_meets_the_tasks_measure_and_the_report_says_so(archive, bf16_is_faster) -> None:
    report = started(archive(configured(), weights=save_weights), Classifier)
    choice = report["config"]["precision_choice"]
    assert choice["chosen"] == "bf16" and report["verify"]["passed"]
    stated = {"name": "probability", "bound": 0.02}
    assert choice["tried"]["bf16"]["measure"] == stated and report["verify"]["measure"] == stated
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
            patched.setattr(trial, "run_case", lambda compiled, served, case: sizes.append(len(case.inputs[0][0])))
            second()
        return [1.5] * 20

    monkeypatch.setattr(precision, "timed_pairs", timed)
    yaml = configured()
    yaml["handler"]["openvino"]["batching"] = {"buckets": [1, 2, 4, 8]}
    report = started(archive(yaml, weights=save_weights, batch_size=8), Classifier)
    assert sizes == [1, 8] and report["verify"]["cases"] == 4
