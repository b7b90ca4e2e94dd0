"""`torchserve-openvino doctor`: exit codes, output and written files."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import torchserve_openvino as tov
from helpers import hypot_refused
from torchserve_openvino.cli import app
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.doctor.bisecting.bisect import Culprits
from torchserve_openvino.doctor.mapping.skeletons import environment

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


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    tov.forget_mappings()


@pytest.fixture
def well(tmp_path: Path) -> Path:
    path = tmp_path / "cli_well.py"
    path.write_text(WELL)
    return path


@pytest.fixture
def ill(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cli_ill.py"
    path.write_text(ILL)
    with hypot_refused():
        yield path


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
        (["nowhere.py"], "file not found"),
        (["{well}", "--input", "a,b"], "is not an input"),
        (["{well}", "--input", "2,5"], "fails in eager PyTorch"),
        (["{well}", "--write"], "--write needs --bisect"),
        (["{well}", "--write-mapping", "{well}"], "exists"),
        (["{well}", "--write-mapping", "my-ops.py"], "plain name"),
        (["{well}", "--html", "absent/page.html"], "absent is no folder"),
        (["{well}", "--dot", "absent/graph.dot"], "absent is no folder"),
        (["{well}", "--write-mapping", "absent/my_ops.py"], "absent is no folder"),
        (["{well}", "--html", "{well.parent}"], "it is a folder"),
        (["{well}", "--dot", "{well.parent}"], "it is a folder"),
        (["{well}", "--config", "{well.parent}", "--bisect", "--write"], "it is a folder"),
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


def test_no_test_is_written_where_pytest_is_missing(ill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "pytest" else find(name, *more))
    result = doctor(ill, "--write-mapping", tmp_path / "cli_ops.py")
    assert (tmp_path / "cli_ops.py").exists() and not (tmp_path / "test_cli_ops.py").exists()
    assert "pytest is not installed" in result.stderr and "then pytest" not in result.stderr


def test_no_mapping_is_written_where_none_is_needed(well: Path, tmp_path: Path) -> None:
    result = doctor(well, "--write-mapping", tmp_path / "no_ops.py")
    assert result.exit_code == 0 and "not written" in result.stderr
    assert not (tmp_path / "no_ops.py").exists()


@pytest.mark.slow
def test_stock_is_what_the_own_backend_of_openvino_does(well: Path) -> None:
    result = doctor(well, "--stock", "--input", "2,4", "--json")
    stock = json.loads(result.stdout)["stock"]
    assert {stock[way]["outcome"] for way in ("as given", "aot_autograd: true")} == {"openvino"}
    assert "the second call overwrote the answer of the first" in stock["text"]


def test_a_right_answer_is_searched_too_and_nothing_is_written(well: Path, tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text("batchSize: 1\n")
    result = doctor(well, "--config", config, "--bisect", "--write", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["bisection"]["kind"] == "nothing_wrong"
    assert "not changed: --bisect found no operator" in result.stderr and config.read_text() == "batchSize: 1\n"


def test_a_model_in_eager_pytorch_is_not_searched(ill: Path, tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text("batchSize: 1\n")
    result = doctor(ill, "--config", config, "--bisect", "--write", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 2 and found["bisection"] is None
    assert any("nothing to search" in note for note in found["report"]["notes"])
    assert "not changed" in result.stderr and config.read_text() == "batchSize: 1\n"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"disabled_ops": [], "ops": ["module.Twice"], "confirmed": True}, "found no operator to disable"),
        ({"disabled_ops": ["aten.relu.default"], "ops": ["aten.relu.default"], "confirmed": False}, "not confirmed"),
        (
            {"disabled_ops": ["aten.relu.default"], "ops": ["m.T", "aten.relu.default"], "confirmed": True},
            "not confirmed",
        ),
    ],
)
def test_only_what_is_known_to_help_is_written(
    well: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], words: str
) -> None:
    bisection = {"kind": "wrong_answer", "explanation": "it is wrong", **found}
    result = Culprits("wrong_answer")
    monkeypatch.setattr(Culprits, "to_dict", lambda self: bisection)
    monkeypatch.setattr("torchserve_openvino.doctor.bisecting.bisect.find_guilty", lambda *args, **named: result)
    config = tmp_path / "model-config.yaml"
    config.write_text("batchSize: 1\n")
    run = doctor(well, "--config", config, "--bisect", "--write")
    assert run.exit_code == 2 and words in run.stderr and config.read_text() == "batchSize: 1\n"


def test_the_limits_of_the_diagnosis_hold_in_the_search(well: Path, tmp_path: Path) -> None:
    config, mapping = tmp_path / "model-config.yaml", tmp_path / "cli_limited_ops.py"
    config.write_text("handler: {openvino: {verify: {max_abs: 100.0, min_cosine: 0.99}}}\n")
    mapping.write_text(WRONG)
    result = doctor(well, "--config", config, "--mapping", mapping, "--bisect", "--json")
    found = json.loads(result.stdout)
    assert "min_cosine" in found["comparison"]["verdict"]
    assert found["bisection"]["ops"] == ["aten.relu.default"] and found["bisection"]["confirmed"]


def test_write_with_another_backend_is_refused_before_the_work(
    well: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchserve_openvino.doctor.diagnose.diagnose", None)
    config = tmp_path / "model-config.yaml"
    config.write_text("pt2: inductor\n")
    result = doctor(well, "--config", config, "--bisect", "--write")
    assert result.exit_code == 1 and "inductor, which has no option disabled_ops" in result.stderr


def test_another_backend_is_noted(well: Path, tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text("pt2: inductor\n")
    result = doctor(well, "--config", config)
    assert result.exit_code == 0 and "the backend inductor cannot be diagnosed" in result.stderr


def test_templates_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    environment.cache_clear()
    for option in ("--html", "--write-mapping"):
        result = doctor("nowhere.py", option, tmp_path / "page.py")
        assert result.exit_code == 1 and "jinja2 is missing" in result.stderr


def test_an_error_of_a_file_does_not_lose_the_diagnosis(
    well: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(diagnosis: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchserve_openvino.doctor.rendering.picture.to_html", fails)
    result = doctor(well, "--html", tmp_path / "page.html")
    assert result.exit_code == 1 and "No space left" in result.stderr
    assert "Everything runs on OpenVINO" in result.stdout


WRONG = """
import openvino.opset13 as ops
import torchserve_openvino as tov
tov.register_op("aten::relu")(lambda x: ops.abs(x))
"""


def test_a_wrong_answer_is_bisected_and_written(well: Path, tmp_path: Path) -> None:
    config, mapping = tmp_path / "model-config.yaml", tmp_path / "cli_wrong_ops.py"
    config.write_text("# mine\nbatchSize: 1  # one\n")
    mapping.write_text(WRONG)
    result = doctor(well, "--config", config, "--mapping", mapping, "--bisect", "--write")
    assert result.exit_code == 2, result.output
    assert "aten.relu.default" in result.stdout and "to blame" in result.stdout
    text = config.read_text()
    assert text.startswith("# mine\nbatchSize: 1  # one\n")
    assert load_serving_config(config).backend.options.disabled_ops == ("aten.relu.default",)
    assert "+" in result.stderr and "disabled_ops" in result.stderr
    again = doctor(well, "--config", config, "--mapping", mapping, "--json")
    assert json.loads(again.stdout)["comparison"]["verdict"] == ""


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "model.py:make_model --input 1,3,224,224" in result.stdout


# A crash that this package avoids (tests/contract/test_openvino.py), as if it did not know it.
DEADLY = """
import torch
from torchserve_openvino.backend.runtime import build
build._crashes = lambda model, device: ""
class Deadly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    def forward(self, x):
        h = x.exp()
        return h + torch.tanh(self.layers(h))
def model():
    return Deadly(), torch.randn(4, 16)
"""


def test_a_compiler_that_ends_the_process_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "cli_deadly.py"
    path.write_text(DEADLY)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "doctor", str(path), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "ended by SIGSEGV; once more" in done.stderr
    (note,) = json.loads(done.stdout)["report"]["notes"]
    assert done.returncode == 0 and "compiler died (SIGSEGV)" in note and "without fusion" in note


def test_a_process_that_dies_again_and_again_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cli_dies.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n")
    command = [sys.executable, "-m", "torchserve_openvino.cli", "doctor", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("SIGABRT") == 3
    assert done.stderr.splitlines()[-1] == "error: the process was ended by SIGABRT"
