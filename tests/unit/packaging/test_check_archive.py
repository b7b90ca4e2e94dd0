"""`check NAME.mar` and `package` find what a worker would refuse, before one is started."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.packaging.archive import run_archiver

NETWORK = "import torch\nclass Network(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
MINE = "from torchserve_openvino.tasks.tensor import TensorHandler\nclass Mine(TensorHandler):\n    pass\n"


def run(command: str, *arguments: object, code: int) -> str:
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def made(tmp_path: Path):
    """Packs an archive with the real torch-model-archiver."""

    def make(model: str = NETWORK, handler: str = MINE, config: str = "batchSize: 2\n", weights: object = None) -> Path:
        for name, text in (("model.py", model), ("mine.py", handler), ("model-config.yaml", config)):
            (tmp_path / name).write_text(text)
        path = tmp_path / "w.pt"
        if isinstance(weights, torch.jit.ScriptModule):
            weights.save(str(path))
        else:
            torch.save(torch.nn.Linear(4, 3).state_dict(), path)
        options = {"--model-file": "model.py", "--serialized-file": "w.pt", "--handler": "mine.py"}
        options["--config-file"] = "model-config.yaml"
        flat = [part for option, name in options.items() for part in (option, str(tmp_path / name))]
        return run_archiver(["--version", "1.0", *flat], "net", tmp_path)

    return make


def test_a_good_archive_shows_its_settings(made) -> None:
    assert "net.mar: valid" in run("check", made(), code=0)
    found = json.loads(CliRunner().invoke(app, ["check", str(made()), "--json"]).stdout)
    assert found["ok"] and found["settings"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "deviceType: tpu\n"}, "deviceType: must be one of cpu, gpu"),
        ({"config": "handler: {openvino: {threads: 1000000000}}\n"}, "the maximum is 1024"),
        (
            {"config": "handler: {openvino: {warmup: {samples: [a.npy]}}}\n"},
            "names 'a.npy': it is not in the archive",
        ),
        ({"model": NETWORK + "class Other:\n    pass\n"}, "must define exactly one class of its own, the model"),
        ({"model": "def broken(:\n"}, "the model file model.py is not valid Python"),
        ({"handler": MINE + "class Other:\n    pass\n"}, "found Mine, Other"),
    ],
)
def test_what_a_worker_would_refuse(made, change, message) -> None:
    path = made(**change)
    assert message in run("check", path, code=1)
    found = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    assert not found["ok"] and found["problems"]


def test_torchscript_is_told_with_the_way_out(made) -> None:
    assert "torch.export" in run("check", made(weights=torch.jit.script(torch.nn.Linear(4, 3))), code=1)


def test_package_checks_first(made, tmp_path: Path) -> None:
    made(model=NETWORK + "class Other:\n    pass\n")
    arguments = ["--model-name", "net", "--model-file", tmp_path / "model.py", "--serialized-file", tmp_path / "w.pt"]
    text = run("package", *arguments, "--handler", tmp_path / "mine.py", "--export-path", tmp_path / "store", code=1)
    assert "a worker would not serve it" in text and not (tmp_path / "store").exists()


def test_a_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.mar", "w") as archive:
        archive.writestr("a.txt", "a")
    assert "was not made by torch-model-archiver" in run("check", tmp_path / "x.mar", code=1)
