"""The fastest precision that passes, where the user named none."""

import pytest
from serving_worker import WARMUP, save_weights

from torchserve_openvino.config import resolve_options
from torchserve_openvino.serving import precision
from torchserve_openvino.serving.precision import Trial, candidates, choose, explain
from torchserve_openvino.tasks.tensor import TensorHandler


def trial(name: str, ms: float, passed: bool = True, coverage: float = 1.0) -> Trial:
    return Trial(name, ms / 1e3, {"passed": passed, "max_abs": 0.1, "cosine": 1.0}, coverage)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial("f32", 10)], "f32"),
        ([trial("f32", 10), trial("bf16", 5)], "bf16"),
        ([trial("f32", 10), trial("bf16", 5, passed=False)], "f32"),
        ([trial("f32", 10), trial("bf16", 5, passed=False), trial("f16", 6)], "f16"),
        ([trial("f32", 10), trial("bf16", 6), trial("f16", 5)], "f16"),
        ([trial("f32", 10), trial("bf16", 9.9)], "f32"),
        ([trial("f32", 10, passed=False), trial("bf16", 20)], "bf16"),
        # The plugin lacked a kernel: eager PyTorch, quick and right, is not what was asked for.
        ([trial("f32", 10), trial("f16", 5, coverage=0.0)], "f32"),
        ([trial("f32", 10, passed=False), trial("bf16", 5, passed=False)], "f32"),
    ],
)
def test_choice(trials, chosen) -> None:
    index = choose(trials)
    assert trials[index].precision == chosen
    assert explain(trials, index)["chosen"] == chosen


def test_candidates_come_from_the_device_and_a_stated_precision_wins(monkeypatch) -> None:
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "BF16", "INT8", "BIN"])
    assert candidates(resolve_options({})) == ["f32", "bf16"]
    assert candidates(resolve_options({"config": {"INFERENCE_PRECISION_HINT": "f32"}})) == []
    assert candidates(resolve_options({"config": {"EXECUTION_MODE_HINT": "ACCURACY"}})) == []
    assert candidates(resolve_options({"device": "AUTO:CPU"})) == []
    assert candidates(None) == []


def test_a_worker_says_what_it_tried(archive, monkeypatch) -> None:
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "BF16"])
    made = archive({"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    report = handler.describe_handle()
    choice = report["config"]["precision_choice"]
    assert set(choice["tried"]) == {"f32", "bf16"} and choice["tried"]["f32"]["passed"]
    served = report["config"]["options"]["config.INFERENCE_PRECISION_HINT"]
    assert served["value"] == choice["chosen"] and "fastest" in served["source"]
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0
