from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app, handler_path

ENTRYPOINTS = Path(handler_path.__globals__["__file__"]).parents[1] / "entrypoints"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on two handlers of the test's own, independent of the shipped ones."""
    files = {}
    for name, line in (("image_classifier", "Pictures to classes."), ("tensor", "Tensors in, tensors out.")):
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(f'"""{line}\n\nMore.\n"""\n', encoding="utf-8")
    monkeypatch.setitem(handler_path.__globals__, "handlers", lambda: files)
    runner = CliRunner()
    return lambda *args: runner.invoke(app, ["handler-path", *args], terminal_width=20)


@pytest.mark.parametrize("name", ["image_classifier", "image-classifier", "image_classifier.py"])
def test_the_path_and_nothing_else(run, tmp_path, name):
    result = run(name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'image_classifier.py'}\n"


@pytest.mark.parametrize("args", [[], ["--list"], ["tensor", "--list"]])
def test_the_list(run, args):
    result = run(*args)
    assert result.stdout.splitlines() == [
        "image_classifier  Pictures to classes.",
        "tensor            Tensors in, tensors out.",
    ]


def test_an_unknown_name(run):
    result = run("image_clasifier")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "valid names: image_classifier, tensor. Did you mean 'image_classifier'?" in result.stderr


@pytest.mark.parametrize("name", ["image_classifier", "tensor"])
def test_the_shipped_handlers(name):
    result = CliRunner().invoke(app, ["handler-path", name])
    assert result.exit_code == 0
    path = Path(result.stdout.removesuffix("\n"))
    assert path == ENTRYPOINTS / f"{name}.py"
    assert path.is_file()
    listed = CliRunner().invoke(app, ["handler-path"]).stdout
    line = next(line for line in listed.splitlines() if line.startswith(name))
    assert len(line.split()) > 2
