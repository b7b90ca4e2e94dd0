import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app

GOOD = "batchSize: 4\npt2: {compile: {enable: true, backend: openvino, options: {config: {NUM_STREAMS: 1}}}}\n"
BAD = "batchsize: 4\npt2:\n  compile:\n    options:\n      device: GPU\n"


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def write(tmp_path, monkeypatch):
    # A relative path, so that the table's columns do not depend on the length of the temporary folder's name.
    monkeypatch.chdir(tmp_path)

    def _write(text):
        path = Path("net.yaml")
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def test_a_valid_file_is_a_table_of_values_and_sources(run, write):
    path = write(GOOD)
    result = run("check", path)
    assert result.exit_code == 0
    assert "\x1b[" not in result.stdout
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert "default" in lines["pt2.compile.options.config.INFERENCE_PRECISION_HINT"]
    assert "net.yaml:1" in lines["batchSize"]
    assert "OPENVINO" not in lines["pt2.compile.options.device"]


def test_environment_shows_as_a_source(run, write, monkeypatch):
    monkeypatch.setenv("OPENVINO_TORCH_BACKEND_DEVICE", "auto")
    assert "env OPENVINO_TORCH_BACKEND_DEVICE" in run("check", write(GOOD)).stdout


def test_json_of_a_valid_file(run, write):
    path = write(GOOD)
    result = run("check", path, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"], answer["file"]) == (0, True, str(path))
    assert answer["settings"]["batchSize"] == {"value": 4, "source": f"{path}:1"}


def test_an_invalid_file_tells_every_problem(run, write):
    path = write(BAD)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{path}:1: batchsize:" in result.stderr
    assert "Did you mean 'batchSize'?" in result.stderr
    assert f"{path}:5: pt2.compile.options.device:" in result.stderr


def test_json_of_an_invalid_file(run, write):
    path = write(BAD)
    result = run("check", path, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert answer["problems"][1] == {
        "type": "DeviceNotFoundError",
        "key": "pt2.compile.options.device",
        "place": f"{path}:5",
        "message": "OpenVINO sees no device 'GPU' on this machine; available: CPU.",
        "suggestion": "CPU",
    }


def test_without_the_device_check(run, write):
    path = write("pt2: {backend: openvino, options: {device: GPU}}\n")
    assert run("check", path).exit_code == 1
    assert run("check", path, "--no-device-check").exit_code == 0


def test_the_users_own_settings_are_mentioned(run, write):
    assert "own settings, kept as they are: profile" in run("check", write("handler: {profile: true}\n")).stdout


def test_markup_in_values_is_shown_as_it_is(run, write):
    path = write("pt2: {backend: inductor, options: {note: '[red]x[/nothing]'}}\n")
    assert "[red]x[/nothing]" in run("check", path).stdout


@pytest.mark.parametrize("text", ["a: [", "- 1\n"])
def test_what_is_no_yaml(run, write, text):
    result = run("check", write(text))
    assert result.exit_code == 1
    assert "net.yaml" in result.stderr


def test_a_file_that_is_not_there(run, tmp_path):
    result = run("check", tmp_path / "absent.yaml")
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr


def test_colours_on_a_terminal_only(write):
    import pty

    path = write(GOOD)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "check", str(path)]
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    main, side = pty.openpty()
    process = subprocess.Popen(command, stdout=side, stderr=side, env=env, close_fds=True)
    os.close(side)
    shown = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(main)
    assert process.wait() == 0
    assert b"\x1b[" in shown
    piped = subprocess.run(command, capture_output=True, env=env, check=True)
    assert b"\x1b[" not in piped.stdout


@pytest.mark.parametrize("args", [["--help"], ["check", "-h"], ["report", "--help"], ["handler-path", "--help"]])
def test_help(run, args):
    result = run(*args)
    assert result.exit_code == 0
    if len(args) > 1:
        assert "Examples:" in result.stdout


@pytest.mark.parametrize("args", [["--help"], ["handler-path"], ["report", "--help"], ["report", "absent.json"]])
def test_these_start_without_torch_and_openvino(args):
    code = (
        "import sys, contextlib\n"
        "from torchserve_openvino.cli import main\n"
        f"sys.argv = ['torchserve-openvino', *{args!r}]\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('LOADED', sorted({'torch', 'openvino', 'ts', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_the_console_script_is_this_app():
    setup = Path(__file__).parents[3] / "setup.py"
    assert "torchserve-openvino=torchserve_openvino.cli:main" in setup.read_text(encoding="utf-8")
