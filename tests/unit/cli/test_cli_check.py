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


def rows(output: str) -> dict[str, str]:
    return {line.split("│")[1].strip(): line for line in output.splitlines() if line.startswith("│")}


def test_a_valid_file_is_a_table_of_values_and_sources(run, write):
    path = write(GOOD)
    result = run("check", path)
    assert result.exit_code == 0
    assert "\x1b[" not in result.stdout
    lines = rows(result.stdout)
    assert "net.yaml:1" in lines["batchSize"] and not any("default" in line for line in lines.values())
    assert "--all shows them" in result.stdout
    lines = rows(run("check", path, "--all").stdout)
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


def test_a_misspelt_backend_hides_no_other_error(run, write):
    options = "{device: GPU, config: {PERFORMANCE_HNT: LATENCY}}"
    for pt2 in (f"{{compile: {{backend: openvno, options: {options}}}}}", f"{{backend: openvno, options: {options}}}"):
        text = f"batchsize: 1\npt2: {pt2}\nhandler: {{openvino: {{wormup: 1, threads: none}}}}\n"
        result = run("check", write(text), "--json")
        keys = [problem["key"].rpartition(".")[2] for problem in json.loads(result.stdout)["problems"]]
        assert sorted(keys) == ["PERFORMANCE_HNT", "backend", "batchsize", "device", "threads", "wormup"]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("handler: {openvino: {threads: 64}}", "threads is 64, but this machine lets a process use 2 core(s)"),
        ("maxWorkers: 2\nhandler: {openvino: {threads: 2}}", "threads is 2 for each of 2 workers"),
        ("pt2: {backend: openvino, options: {config: {NUM_STREAMS: 9}}}", "NUM_STREAMS is 9"),
        ("handler: {openvino: {warmup: {batch_sizes: [64]}}}", "batchSize is 1: each request with one item is padded"),
        ("handler: {openvino: {warmup: {batch_sizes: [1, 64]}}}", "warmup.batch_sizes has 64, but batchSize is 1"),
        ("batchSize: 4\nhandler: {openvino: {batching: {buckets: [2, 8]}}}", "batching.buckets has 8"),
        ("batchSize: 200", "jobQueueSize is 100, less than the 200 requests"),
    ],
)
def test_what_is_implausible_is_a_warning(run, write, monkeypatch, text, warning):
    monkeypatch.setattr("torchserve_openvino.serving.threads.usable_cores", lambda: 2)
    result = run("check", write(f"{text}\n"))
    assert result.exit_code == 0 and warning in " ".join(result.stdout.split())
    assert any(warning in each for each in json.loads(run("check", "net.yaml", "--json").stdout)["warnings"])


@pytest.mark.parametrize("text", [GOOD, "batchSize: 8\nhandler: {openvino: {warmup: {batch_sizes: [1, 8]}}}\n"])
def test_what_is_plausible_has_no_warning(run, write, text):
    assert json.loads(run("check", write(text), "--json").stdout)["warnings"] == []


def test_a_cache_folder_that_a_worker_refuses(run, write, tmp_path):
    (tmp_path / "cache").mkdir()
    options = f"{{model_caching: true, cache_dir: {tmp_path / 'cache'}}}"
    path = write(f"pt2: {{backend: openvino, options: {options}}}\n")
    for mode, code in ((0o1777, 0), (0o700, 0), (0o770, 1)):
        (tmp_path / "cache").chmod(mode)
        result = run("check", path)
        assert result.exit_code == code
    assert "pt2.compile.options.cache_dir" in result.stderr and "chmod go-w" in result.stderr
    assert run("check", path, "--no-device-check").exit_code == 0


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


def test_colors_on_a_terminal_only(write):
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
