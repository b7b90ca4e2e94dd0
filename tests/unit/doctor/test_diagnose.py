"""Diagnoses of real models: what is refused, where, and how the parts add up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ill_models import ANY_SIZE, ILL, WELL, written

from helpers import hypot_refused, stick
from torchserve_openvino.config import resolve_options
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.doctor.diagnose import diagnose, split_where
from torchserve_openvino.doctor.diagnosis import Diagnosis
from torchserve_openvino.doctor.measure import limit_to
from torchserve_openvino.doctor.target import SampleCall, Target, TargetSpec, load_target


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    folder = tmp_path_factory.mktemp("ill")
    config = written(folder, "model-config.yaml", ANY_SIZE)
    with hypot_refused():
        return diagnose(load_target(TargetSpec(written(folder, "ill_file.py", ILL), config)))


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(ILL.splitlines(), start=1) if text in line)


def test_each_refused_operator_has_its_place_and_reason(ill: Diagnosis) -> None:
    refused = {each.op: each for each in ill.refused}
    assert set(refused) == {
        "illlib.swishy.default",
        "aten.hypot.default",
        "aten._linalg_det.default",
    }
    hypot = refused["aten.hypot.default"]
    assert hypot.where == [f"ill_file.py:{line_of('torch.hypot')}"]
    assert hypot.source == "y = torch.hypot(y, y)"
    assert (hypot.kind, hypot.count) == ("unsupported_op", 1) and "aten.hypot.default" in hypot.reason
    assert hypot.inputs == ["float32[3, 4]", "float32[3, 4]"] and hypot.outputs == ["float32[3, 4]"]
    assert refused["illlib.swishy.default"].inputs == ["float32[3, 4]", "2.0"]


def test_operators_add_up(ill: Diagnosis) -> None:
    summary = ill.summary
    assert sum(row.count for row in ill.ops) == summary["ops_total"]
    assert sum(row.on_openvino for row in ill.ops) == summary["ops_on_openvino"]
    assert summary["ops_total"] - summary["ops_on_openvino"] == sum(each.count for each in ill.refused)
    assert sum(row.share for row in ill.ops) == pytest.approx(1.0)
    assert all(row.eager_ms > 0 for row in ill.ops)
    assert 0 < summary["coverage"] < 1 and not summary["all_on_openvino"] and not ill.healthy
    assert {row.op: row.runs_on for row in ill.ops}["aten.hypot.default"] == "eager"


def test_graph_breaks_have_a_hint_for_their_cause(ill: Diagnosis) -> None:
    found = {each.source: each.next_steps[0].title for each in ill.graph_breaks}
    assert found == {
        'print("hello")': "remove print or logging calls from forward",
        "if y.sum().item() > 1e9:": "keep the value in a tensor",
    }
    assert {each.where for each in ill.graph_breaks} == {
        f"ill_file.py:{line_of('print(')}",
        f"ill_file.py:{line_of('.item()')}",
    }


def test_the_picture_shows_the_way_of_the_data(ill: Diagnosis) -> None:
    assert [picture.index for picture in ill.pictures] == list(range(ill.summary["graphs"]))
    last = ill.pictures[-1]
    labels = {box.id: box.label for box in last.boxes}
    assert {"inputs", "outputs", "aten.hypot.default"} <= set(labels.values())
    ways = {(labels[first], labels[second]) for first, second in last.edges}
    assert ("illlib.swishy.default", "aten.hypot.default") in ways
    assert all(box.ms > 0 for box in last.boxes if box.runs_on not in {"input", "output"})


def test_the_answer_is_compared_with_eager(ill: Diagnosis) -> None:
    assert ill.comparison["verdict"] == "" and ill.comparison["max_abs"] < 1e-3
    assert ill.comparison["outputs"] == ["float32[3, 4]", "float32[4]"]


def test_a_diagnosis_is_json(ill: Diagnosis) -> None:
    plain = ill.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["schema"] == 1 and plain["healthy"] is False
    assert plain["report"]["summary"]["graphs"] >= plain["summary"]["graphs"]
    assert {row["runs_on"] for row in plain["ops"]} == {"openvino", "eager"}


def test_a_model_that_runs_as_a_whole_is_healthy(tmp_path: Path) -> None:
    said: list[str] = []
    found = diagnose(load_target(TargetSpec(written(tmp_path, "well_file.py", WELL))), said.append)
    assert found.healthy and not found.refused and not found.fallbacks and not found.drafts()
    assert found.inputs == ["float32[3, 4]"]
    assert "compiling for OpenVINO" in said
    (picture,) = found.pictures
    # Weights are constants and get no box.
    assert [box.label for box in picture.boxes] == ["inputs", "openvino_0", "outputs"]


def test_a_disabled_operator_is_tried_again(tmp_path: Path) -> None:
    config = written(tmp_path, "model-config.yaml", "pt2: {compile: {options: {disabled_ops: [aten.relu]}}}\n")
    spec = TargetSpec(written(tmp_path, "disabled_file.py", WELL), config)
    (refused,) = diagnose(load_target(spec)).refused
    assert (refused.op, refused.kind) == ("aten.relu.default", "disabled_op")
    (step,) = refused.next_steps
    assert step.kind == "enable" and step.proven and "disabled_ops" in step.title


@pytest.mark.parametrize("backend", ["export", "openvino_ts"])
def test_the_backend_of_the_yaml_is_diagnosed_and_tried(tmp_path: Path, backend: str) -> None:
    config = written(
        tmp_path,
        "model-config.yaml",
        f"pt2: {{compile: {{backend: {backend}, options: {{disabled_ops: [aten.relu]}}}}}}\n",
    )
    found = diagnose(load_target(TargetSpec(written(tmp_path, f"{backend}_file.py", WELL), config)))
    assert found.report["config"]["backend"] == backend and not found.comparison["verdict"]
    (refused,) = found.refused
    (step,) = refused.next_steps
    assert (refused.op, step.kind, step.proven) == ("aten.relu.default", "enable", True), step.text


def test_types_that_openvino_lacks_get_a_rewrite_not_a_mapping(tmp_path: Path) -> None:
    text = """
import torch

class Wide(torch.nn.Module):
    def forward(self, x):
        return x.double() + 1, torch.fft.rfft(x).sqrt().abs()

def model():
    return Wide(), torch.randn(2, 4)
"""
    found = diagnose(load_target(TargetSpec(written(tmp_path, "wide_file.py", text))))
    titles: dict[str, Any] = {each.op: [step.title for step in each.next_steps] for each in found.refused}
    assert titles["aten.add.Tensor"] == ["compute in float32"]
    assert titles["aten.sqrt.default"] == ["compute with real and imaginary parts"]


@pytest.mark.parametrize(("max_abs", "words"), [(None, ""), (1e-9, "more than 1e-09")])
def test_the_limits_are_those_of_the_configuration(max_abs: float | None, words: str) -> None:
    """The doctor applies `verify.max_abs` of the YAML, as a worker does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).eval()
    target = Target(
        model,
        SampleCall((torch.randn(4, 64),), {}),
        resolve_options(None),
        "net",
        verify=VerifySection(max_abs=max_abs),
    )
    verdict = diagnose(target).comparison["verdict"]
    assert words in verdict and bool(verdict) == bool(words)


class Changing(torch.nn.Module):
    """Writes to its input, counts its calls in a buffer and an attribute, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.count += 1
        return torch.relu(x.add_(self.calls)) + torch.rand(3) + self.count


def test_both_models_run_from_the_same_state() -> None:
    x = torch.randn(3)
    before = x.clone()
    target = Target(Changing().eval(), SampleCall((x,), {}), resolve_options(None), "changing")
    compared = diagnose(target).comparison
    assert compared["verdict"] == "" and compared["max_abs"] < 1e-5
    assert torch.equal(x, before)


def test_a_difference_that_shows_on_other_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stick(monkeypatch)
    target = Target(torch.nn.Tanh(), SampleCall((torch.tensor([-1.0, 0.5, 2.0]),), {}), resolve_options(None), "net")
    found = diagnose(target)
    assert found.comparison["verdict"].startswith("with the values in reverse order: output 0: differs by")
    assert found.comparison["max_abs"] > 0.1 and not found.healthy


def test_other_values_that_eager_refuses_are_not_compared() -> None:
    class Sorted(torch.nn.Module):
        def forward(self, table: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding_bag(torch.arange(6), table, bags, mode="sum") * 2

    call = SampleCall((torch.randn(6, 2), torch.tensor([0, 1, 5])), {})
    assert diagnose(Target(Sorted().eval(), call, resolve_options(None), "net")).comparison["verdict"] == ""


def test_an_answer_of_the_search_counts(tmp_path: Path) -> None:
    found = diagnose(load_target(TargetSpec(written(tmp_path, "searched_file.py", WELL))))
    for kind, healthy in (("nothing_wrong", True), ("wrong_answer", False), ("not_repaired", False)):
        found.bisection = {"kind": kind}
        assert found.healthy == healthy


def test_times_of_parts_add_up_to_no_more_than_the_call() -> None:
    parts = [{"a": 3.0, "b": 1.0}, {"c": 4.0}]
    limit_to(parts, 4.0)
    assert parts == [{"a": 1.5, "b": 0.5}, {"c": 2.0}]
    limit_to(parts, 100.0)
    assert parts == [{"a": 1.5, "b": 0.5}, {"c": 2.0}]
    limit_to([], 1.0)


@pytest.mark.parametrize(
    ("where", "split"),
    [
        ("/home/me/my models/net.py:12 (forward)", ("/home/me/my models/net.py", 12)),
        ("net.py:3", ("net.py", 3)), ("/a (b)/net.py:3", ("/a (b)/net.py", 3)), ("nowhere", ("nowhere", 0)),
    ],
)  # fmt: skip
def test_a_place_may_have_spaces(where: str, split: tuple[str, int]) -> None:
    assert split_where(where) == split
