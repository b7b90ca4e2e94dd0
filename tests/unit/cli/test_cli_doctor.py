"""`torchserve-openvino doctor`: exit codes, files, and what is handed on."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.doctor.target import TargetSpec

WELL = """
import torch
def model():
    torch.manual_seed(0)
    print("from the model")
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
"""
ILL = """
import torch
class Ill(torch.nn.Module):
    def forward(self, x):
        print("from forward")
        return torch.hypot(x, x)
def model():
    return Ill(), torch.randn(2, 4)
"""


@pytest.fixture
def well(tmp_path: Path) -> Path:
    path = tmp_path / "cli_well.py"
    path.write_text(WELL)
    return path


@pytest.fixture
def ill(tmp_path: Path) -> Path:
    path = tmp_path / "cli_ill.py"
    path.write_text(ILL)
    return path


def doctor(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_healthy_model_exits_with_0(well: Path) -> None:
    result = doctor(well)
    assert result.exit_code == 0, result.output
    assert "Everything runs on OpenVINO" in result.stdout and "100.0%" in result.stdout


def test_a_fallback_exits_with_2_and_stdout_is_json_alone(ill: Path) -> None:
    result = doctor(ill, "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["refused"][0]["op"] == "aten.hypot.default" and not found["healthy"]
    assert "from forward" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no file"),
        (["{well}", "--input", "a,b"], "is no input"),
        (["{well}", "--input", "2,5"], "fails in eager PyTorch"),
        (["{well}", "--write"], "--write needs --bisect"),
        (["{well}", "--write-mapping", "{well}"], "exists"),
        (["{well}", "--write-mapping", "my-ops.py"], "plain name"),
        (["{well}", "--config", "{well}"], "YAML"),
    ],
)
def test_a_mistake_exits_with_1_and_says_what(well: Path, arguments: list[str], message: str) -> None:
    result = doctor(*(each.format(well=well) for each in arguments))
    assert result.exit_code == 1 and message in result.stderr


def test_pages_graphs_and_mappings_are_written(ill: Path, tmp_path: Path) -> None:
    mapping = tmp_path / "cli_ops.py"
    result = doctor(
        ill, "--html", tmp_path / "d.html", "--dot", tmp_path / "d.dot", "--write-mapping", mapping, "--cpp"
    )
    assert result.exit_code == 2
    assert (tmp_path / "d.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "d.dot").read_text().startswith("digraph")
    assert '@tov.register_op("aten.hypot.default")' in mapping.read_text()
    assert "cli_ops.py" in (tmp_path / "test_cli_ops.py").read_text()
    assert "translate_hypot" in result.stdout and str(mapping) in result.stderr


def test_no_mapping_is_written_where_none_is_needed(well: Path, tmp_path: Path) -> None:
    result = doctor(well, "--write-mapping", tmp_path / "no_ops.py")
    assert result.exit_code == 0 and "not written" in result.stderr
    assert not (tmp_path / "no_ops.py").exists()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(f"torchserve_openvino.doctor.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_stock_is_asked_with_the_facts_of_the_command_line(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TargetSpec] = []

    def what_upstream_does(spec: TargetSpec) -> Any:
        asked.append(spec)
        return SimpleNamespace(to_dict=lambda: {"ran": False}, text=lambda: "it runs in eager PyTorch")

    stand_in(monkeypatch, "stock", what_upstream_does=what_upstream_does)
    result = doctor(well, "--stock", "--input", "2,4", "--json")
    assert asked == [TargetSpec(str(well), None, ("2,4",), ())]
    assert json.loads(result.stdout)["stock"] == {"ran": False, "text": "it runs in eager PyTorch"}
    assert "it runs in eager PyTorch" in doctor(well, "--stock").stdout


def test_a_right_answer_is_not_bisected(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "bisect", find_guilty=lambda *_, **__: pytest.fail("nothing is wrong"))
    result = doctor(well, "--bisect", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["bisection"] is None


def test_a_wrong_answer_is_bisected_and_written(well: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchserve_openvino.doctor import diagnose

    config = tmp_path / "model-config.yaml"
    config.write_text("batchSize: 1\n")
    edits: list[Any] = []

    def find_guilty(model: Any, inputs: Any, options: Any, *, tolerance: str, progress: Any) -> Any:
        model(*inputs.args, **inputs.kwargs)
        progress("halving")
        assert tolerance == "f32" and options.options.device == "CPU"
        return SimpleNamespace(
            to_dict=lambda: {"runs": 3}, explanation=lambda: "relu is guilty", disabled_ops=["aten.relu.default"]
        )

    def add_disabled_ops(path: Path, ops: list[str]) -> str:
        edits.append((path, ops))
        return "+ disabled_ops: [aten.relu.default]"

    monkeypatch.setattr(diagnose, "difference", lambda *_: "output 0 differs by 1, more than 0.001")
    stand_in(monkeypatch, "bisect", find_guilty=find_guilty)
    stand_in(monkeypatch, "yaml_edit", add_disabled_ops=add_disabled_ops)
    result = doctor(well, "--config", config, "--bisect", "--write")
    assert result.exit_code == 2 and edits == [(config, ["aten.relu.default"])]
    assert "relu is guilty" in result.stdout and "+ disabled_ops" in result.stderr


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "model.py:make_model --input 1,3,224,224" in result.stdout
