"""`check NAME.mar` and `package` find what a worker would refuse, before one is started."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.config.openvino import precisions
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.packaging.archive import run_archiver
from torchserve_openvino.packaging.check_archive import missing_imports
from torchserve_openvino.serving.loading.files import read_state

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
        elif isinstance(weights, bytes):
            path.write_bytes(weights)
        elif weights is not None:
            torch.save(weights, path)
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
    assert found["ok"] and found["settings"]["batchSize"] == {"value": 2, "source": "model-config.yaml:1"}


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


def test_a_precision_that_this_cpu_lacks_is_reported(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, "instruction_set", lambda: "Intel AVX2")
    config = "pt2: {compile: {backend: openvino}}\nhandler: {openvino: {precision: bf16x3}}\n"
    text = run("check", made(config=config), code=1)
    assert "precision" in text and "bf16x3 needs a CPU with AMX for bfloat16; OpenVINO uses Intel AVX2" in text


NETWORK_OF = "{}\n" + NETWORK


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "import absent_helper",
            "model.py, line 1: imports absent_helper, which is neither in the archive nor installed",
        ),
        ("from absent_helper.layers import Block", "package absent_helper.py with --extra-files"),
        ("from .layers import Block", "relative imports fail in a model archive"),
        ("import left_beside", "imports left_beside, which is neither"),
        ("import torch.nn, json, yaml, numpy as np", ""),
        ("try:\n    import absent_helper\nexcept ImportError:\n    absent_helper = None", ""),
        ("def later():\n    import absent_helper", ""),
    ],
)
def test_what_a_model_file_imports_is_in_the_archive_or_installed(made, tmp_path, monkeypatch, line, message) -> None:
    # A file beside the model's, where the archive is made, is not in the archive.
    (tmp_path / "left_beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert message in run("check", made(model=NETWORK_OF.format(line)), code=1 if message else 0)


def test_imports_of_extra_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("import absent_helper\n")
    (tmp_path / "model.py").write_text("from layers import Block\n")
    assert "layers.py, line 1: imports absent_helper" in "".join(missing_imports(tmp_path, ["model.py"]))
    (tmp_path / "absent_helper.py").write_text("import model\n")
    assert list(missing_imports(tmp_path, ["model.py"])) == []
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "model.py").write_text("import pack.inner\nfrom pack import inner\n")
    (tmp_path / "pack" / "inner.py").write_text("import absent\n")
    assert "pack/inner.py, line 1: imports absent" in "".join(missing_imports(tmp_path, ["model.py"]))


def test_an_imported_class_is_no_class_of_the_file(made) -> None:
    text = run("check", made(model="from torch.nn import Linear as Net\n"), code=1)
    assert "found none" in text and "add `class Mine(Net): pass`" in text


def test_errors_of_the_configuration_hide_no_others(made) -> None:
    path = made(config="batchsize: 2\nhandler: {openvino: {wormup: 1}}\n", model=NETWORK + "class Other:\n    pass\n")
    text = run("check", path, code=1)
    assert "batchsize" in text and "wormup" in text and "exactly one class" in text
    found = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)["problems"]
    assert [problem.get("key", "") for problem in found] == ["batchsize", "handler.openvino.wormup", ""]


def test_package_reports_an_invalid_configuration(made, tmp_path: Path) -> None:
    made(config="batchsize: 2\n")
    arguments = ["--model-name", "net", "--model-file", tmp_path / "model.py", "--serialized-file", tmp_path / "w.pt"]
    arguments += ["--config-file", tmp_path / "model-config.yaml", "--export-path", tmp_path / "store"]
    assert "Did you mean 'batchSize'?" in run("package", *arguments, code=1)


class Saving(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "x")
        return x


def test_torchscript_is_checked_before_it_is_loaded(made) -> None:
    run("check", made(weights=torch.jit.script(torch.nn.Linear(4, 3))), code=0)
    assert "aten::save, which opens files" in run("check", made(weights=torch.jit.script(Saving())), code=1)


def test_the_key_of_a_checkpoint_is_checked(made) -> None:
    section = "handler: {openvino: {weights: {key: model_ema}}}\n"
    assert "no state_dict under 'model_ema'" in run("check", made(config=section), code=1)


def test_weights_that_only_a_pickle_can_read_are_refused(made) -> None:
    text = run("check", made(weights=torch.nn.Linear(4, 3)), code=1)
    assert "w.pt cannot be loaded with weights_only=True" in text and "save model.state_dict()" in text


@pytest.mark.parametrize("weights", [b"", b"\x80\x02no pickle", b"PK\x03\x04 no zip"], ids=["empty", "pickle", "zip"])
def test_damaged_weights_are_refused(made, weights: bytes) -> None:
    assert "w.pt" in run("check", made(weights=weights), code=1)


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelLoadError, match=r"w\.safetensors is damaged, or no safetensors file"):
        read_state(path)


@pytest.mark.parametrize(
    "handler",
    [
        MINE.replace("pass", "def initialize(self, context):\n        self.model = None"),
        f"from ts.torch_handler.base_handler import BaseHandler\n{MINE.replace('Mine(', 'Mine(BaseHandler, ')}",
    ],
    ids=["method", "base"],
)
def test_a_handler_of_the_users_own_may_read_any_weights(made, handler: str) -> None:
    assert "valid" in run("check", made(handler=handler, weights=b"my own format"), code=0)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_that_a_wrapper_made_are_no_error_but_said(made, prefix: str) -> None:
    weights = {f"{prefix}{name}": value for name, value in torch.nn.Linear(4, 3).state_dict().items()}
    assert f'{{strip_prefix: "{prefix}"}}' in run("check", made(weights=weights), code=0)
    named = f'handler: {{openvino: {{weights: {{strip_prefix: "{prefix}"}}}}}}\n'
    assert "begin with" not in run("check", made(weights=weights, config=named), code=0)
    assert "begin with" not in run("check", made(), code=0)


def test_package_checks_first(made, tmp_path: Path) -> None:
    made(model=NETWORK + "class Other:\n    pass\n")
    arguments = ["--model-name", "net", "--model-file", tmp_path / "model.py", "--serialized-file", tmp_path / "w.pt"]
    text = run("package", *arguments, "--handler", tmp_path / "mine.py", "--export-path", tmp_path / "store", code=1)
    assert "a worker would not serve it" in text and not (tmp_path / "store").exists()


def test_a_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.mar", "w") as archive:
        archive.writestr("a.txt", "a")
    assert "was not made by torch-model-archiver" in run("check", tmp_path / "x.mar", code=1)


OWN = "from ts.torch_handler.base_handler import BaseHandler\nclass Mine(BaseHandler): pass\n"


def test_an_archive_that_this_package_would_not_serve_is_no_error_but_said(made) -> None:
    text = run("check", made(handler=OWN), code=0)
    assert "the handler mine.py is not one of this package's" in text and "handler.openvino.wrap" in text
    assert "not one of this package's" not in run("check", made(), code=0)


def test_an_archive_without_weights_is_no_error_but_said(made, tmp_path: Path) -> None:
    made()
    handler = str(handlers()["tensor"])
    arguments = ["--version", "1.0", "--model-file", str(tmp_path / "model.py"), "--handler", handler]
    assert "maybe random" in run("check", run_archiver(arguments, "bare", tmp_path), code=0)


@pytest.mark.parametrize(
    "line",
    ["handle = Mine().handle", "from mine_too import handle", "import mine_too as handle", "first, handle = 1, print"],
)
def test_a_handle_that_is_no_function_of_the_file_counts(made, line: str) -> None:
    problem = "or a function handle"
    assert problem in run("check", made(handler=f"{MINE}class Other:\n    pass\n"), code=1)
    found = CliRunner().invoke(app, ["check", str(made(handler=f"{MINE}class Other:\n    pass\n{line}\n"))])
    assert problem not in " ".join(found.output.split())
