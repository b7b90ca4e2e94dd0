"""`package --tuned`: the archive keeps what the tuner found and where; `check` warns on another machine."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchserve_openvino.bench.machine import machine
from torchserve_openvino.cli import app
from torchserve_openvino.packaging.archive import run_archiver
from torchserve_openvino.serving.threads import usable_cores
from torchserve_openvino.tune.autoscaling import autoscaling
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings

NETWORK = "import torch\nclass Network(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
HANDLER = "from torchserve_openvino.tasks.tensor import TensorHandler\nclass Mine(TensorHandler):\n    pass\n"
TUNED_YAML = "# tuned\nbatchSize: 8\n"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Writes an archive, and beside it what `tune` writes."""
    for name, text in (("model.py", NETWORK), ("mine.py", HANDLER), ("model-config.yaml", "batchSize: 2\n")):
        (tmp_path / name).write_text(text)
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "w.pt")
    options = {"--model-file": "model.py", "--serialized-file": "w.pt", "--handler": "mine.py"}
    options["--config-file"] = "model-config.yaml"
    flat = [part for option, name in options.items() for part in (option, str(tmp_path / name))]
    archive = run_archiver(["--version", "1.0", *flat], "net", tmp_path)
    folder = tmp_path / "net-tuned"
    folder.mkdir()
    (folder / "model-config.yaml").write_text(TUNED_YAML)
    write(folder, archive=str(archive), model="net", choice="8 x 2", reason="best of 3", trials=[1, 2])
    return folder


def write(folder: Path, **facts: Any) -> None:
    path = folder / "tune.json"
    known = json.loads(path.read_text()) if path.exists() else {"machine": machine(usable_cores())}
    path.write_text(json.dumps({**known, **facts}))


def test_the_archive_has_the_configuration_and_what_it_was_found_on(results: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert "net.mar" in run("package", "--tuned", results, "--export-path", store)
    with zipfile.ZipFile(store / "net.mar") as archive:
        assert archive.read("model-config.yaml").decode() == TUNED_YAML
        kept = json.loads(archive.read("tuned.json"))
    assert kept["choice"] == "8 x 2" and "trials" not in kept and "archive" not in kept
    assert "warning" not in run("check", store / "net.mar")
    first = (store / "net.mar").read_bytes()
    assert "--force" in run("package", "--tuned", results, "--export-path", store, code=1)
    run("package", "--tuned", results, "--export-path", store, "--force")
    assert (store / "net.mar").read_bytes() == first


def test_check_warns_on_another_machine(results: Path, tmp_path: Path) -> None:
    there = machine(usable_cores() + 6)
    there["processor"], there["versions"]["openvino"] = "Another CPU", "2020.1"
    write(results, machine=there)
    run("package", "--tuned", results, "--export-path", tmp_path / "store")
    shown = run("check", tmp_path / "store" / "net.mar")
    for fact in ("processor Another CPU", f"cores {usable_cores() + 6}", "openvino 2020.1"):
        assert f"warning: tuned with {fact}, here it is" in shown
    assert "torch " not in shown.partition("warning")[2]
    found = json.loads(CliRunner().invoke(app, ["check", str(tmp_path / "store" / "net.mar"), "--json"]).stdout)
    assert found["ok"] and len(found["warnings"]) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": None, "reason": "all were late"}, "nothing was chosen (all were late)"),
        ({"archive": "/nowhere/net.mar"}, "/nowhere/net.mar, which is not there"),
    ],
)
def test_what_cannot_be_packaged(results: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(results, **change)
    assert message in run("package", "--tuned", results, "--export-path", tmp_path / "store", code=1)
    assert not (tmp_path / "store").exists()


def test_a_folder_that_the_tuner_did_not_write(tmp_path: Path) -> None:
    assert "give the folder that `tune` wrote" in run("package", "--tuned", tmp_path, code=1)


def test_a_configuration_that_was_broken_by_hand_is_refused(results: Path, tmp_path: Path) -> None:
    (results / "model-config.yaml").write_text("batchSize: [\n")
    run("package", "--tuned", results, "--export-path", tmp_path / "store", code=1)
    assert not (tmp_path / "store").exists()


def test_targets_for_autoscalers() -> None:
    """40 requests/s of 2 workers at 100 ms are 4 at a time; 70 % of that are 1.4 for each worker."""
    targets = autoscaling(Candidate(ComputeSettings("f32", 1, 1), 2, 8, 5), 40.0, 100.0, 12.34)
    assert targets["keda"]["metadata"]["threshold"] == "28"
    assert targets["ray"] == {"autoscaling_config": {"target_ongoing_requests": 1.4}, "max_ongoing_requests": 8}
    assert targets["ready_seconds"] == 12.3


def test_options_that_mean_nothing_beside_it(results: Path, tmp_path: Path) -> None:
    for option in (
        ["--extra-files", str(results)],
        ["--quantize", "int8"],
        ["--model-name", "net"],
        ["--bundle-package"],
    ):
        said = run("package", "--tuned", results, "--export-path", tmp_path / "store", *option, code=2)
        assert f"{option[0]} and --tuned exclude each other" in said.replace("│ ", "").replace(" │", "")
    assert "--level needs --precompile" in run("package", "--tuned", results, "--level", "avx2", code=2)


def test_compiled_graphs_are_those_of_the_configuration_that_was_found(results: Path, tmp_path: Path) -> None:
    (results / "model-config.yaml").write_text(
        "batchSize: 4\npt2: {compile: {enable: true, backend: openvino}}\n"
        "handler: {openvino: {warmup: {inputs: [{shape: [4]}], batch_sizes: [4]}}}\n"
    )
    run("package", "--tuned", results, "--export-path", tmp_path / "store", "--precompile")
    first = package_check(tmp_path / "store" / "net.mar")
    assert first["start"] == "warm"
    # What was tuned had graphs of its own, for other sizes: they do not stay.
    write(results, archive=str(tmp_path / "store" / "net.mar"))
    config = (results / "model-config.yaml").read_text()
    (results / "model-config.yaml").write_text(config.replace("batch_sizes: [4]", "batch_sizes: [2]"))
    run("package", "--tuned", results, "--export-path", tmp_path / "again")
    again = package_check(tmp_path / "again" / "net.mar")
    assert again["start"] == "warm" and not again["reasons"]


def package_check(archive: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["package", "--check", str(archive), "--json"]).stdout)
    return found
