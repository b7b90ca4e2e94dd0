"""`torchserve-openvino why`: finds the cause in the logs, even without a server."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app

NOBODY = "http://127.0.0.1:9"
AT = "2026-11-22T21:55:22,{:03} [INFO ] W-9000-{}-stdout MODEL_LOG - {}"
REFUSED = "ERROR: net is not served. ConfigError: model-config.yaml:7: handler.openvino.wormup: unknown key"


@pytest.fixture
def logs(tmp_path: Path):
    def write(*lines: str, frontend: str = "") -> Path:
        (tmp_path / "model_log.log").write_text("\n".join(lines) + "\n")
        (tmp_path / "ts_log.log").write_text(frontend)
        return tmp_path

    return write


def why(folder: Path, name: str = "net", code: int = 1, json_too: bool = True) -> dict:
    options = ["why", name, "--logs", str(folder), "--management", NOBODY, "--timeout", "0.5"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == code, result.output
    if not json_too:
        return {"text": result.output}
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    return {"text": result.output, **found}


def test_the_cause_is_found_among_tracebacks_and_other_models(logs) -> None:
    folder = logs(
        AT.format(1, "net_1.0", REFUSED),
        AT.format(2, "net_1.0", "Traceback (most recent call last):"),
        AT.format(3, "net_1.0", "torchserve_openvino.errors.ModelLoadError: ConfigError: ..."),
        AT.format(4, "network_1.0", REFUSED.replace("net ", "network ")),
        AT.format(5, "net_1.0", REFUSED),
    )
    found = why(folder)
    assert found["cause"]["text"].startswith("ConfigError: model-config.yaml:7") and found["cause"]["times"] == 2
    assert "cause: ConfigError: model-config.yaml:7" in found["text"] and "2 times" in found["text"]
    assert "no server answers" in found["text"] and not found["served"]


def test_the_cause_of_another_handler_is_its_exception(logs) -> None:
    folder = logs(
        AT.format(1, "a_b_2.0", "Traceback (most recent call last):"),
        AT.format(2, "a_b_2.0", "ModuleNotFoundError: No module named 'transformers'"),
    )
    found = why(folder, "a_b")
    assert found["cause"]["text"] == "ModuleNotFoundError: No module named 'transformers'"
    assert "requirements.txt" in found["cause"]["fix"]


def test_a_worker_that_is_late_is_told_so(logs) -> None:
    frontend = (
        "2026-11-22T21:55:57,382 [ERROR] W-9000-net_1.0 org.pytorch.serve.wlm.WorkerThread - Backend worker error\n"
        "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time\n"
        "\tat org.pytorch.serve.wlm.WorkerThread.run(WorkerThread.java:237) [model-server.jar:?]\n"
    )
    found = why(logs(AT.format(1, "net_1.0", "Warm-up 1 of 9"), frontend=frontend))
    assert "within startupTimeout" in found["cause"]["text"] and "raise startupTimeout" in found["text"]


def test_a_worker_whose_process_is_slow_is_told_apart(logs) -> None:
    frontend = (
        "2026-11-22T21:55:57,382 [ERROR] W-9000-net_1.0 org.pytorch.serve.wlm.WorkerThread - Backend worker error\n"
        "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker startup time out.\n"
    )
    found = why(logs(frontend=frontend))
    assert "TorchServe's two minutes" in found["cause"]["text"] and "fewer workers" in found["text"]


def test_an_archive_that_torchserve_did_not_load_is_named(logs) -> None:
    frontend = (
        "2026-11-22T21:55:57,382 [WARN ] main org.pytorch.serve.ModelServer - Failed to load model: own2.mar\n"
        "org.pytorch.serve.archive.model.ModelNotFoundException: Model not found at: own2.mar\n"
    )
    text = " ".join(why(logs(frontend=frontend), "own", json_too=False)["text"].split())
    assert "TorchServe logged: Failed to load model: own2.mar" in text


GONE = (
    "2026-11-22T21:55:57,382 [DEBUG] W-9000-net_1.0 org.pytorch.serve.wlm.WorkerThread - Backend worker "
    "monitoring thread interrupted or backend worker process died., startupTimeout:120sec\n"
    "java.lang.InterruptedException: null\n"
)


def test_a_worker_that_ended_without_a_word_was_not_late(logs) -> None:
    found = why(logs(AT.format(1, "net_1.0", "Listening"), frontend=GONE))
    assert "process ended" in found["cause"]["text"] and "startupTimeout" not in found["cause"]["text"]
    assert "the next one finds that out" in " ".join(found["text"].split())


def test_a_death_of_the_compiler_is_named_with_its_partition_and_signal(logs) -> None:
    died = (
        "OpenVINO's compiler died (SIGFPE) compiling graph 0 / openvino_0 (3x MatMul): left in eager PyTorch until ..."
    )
    fallback = f"Fallback: graph 0 / openvino_0 runs on eager (compile_died): {died}"
    found = why(logs(AT.format(1, "net_1.0", "Listening"), AT.format(2, "net_1.0", fallback), frontend=GONE))
    assert found["cause"]["text"] == died
    assert "without fusion" in found["cause"]["fix"] and "disabled_ops" in found["cause"]["fix"]


@pytest.mark.parametrize("lines", [[], [AT.format(1, "net_1.0", "Listening")], None])
def test_nothing_is_made_up(logs, lines, tmp_path: Path) -> None:
    text = why(tmp_path / "nowhere" if lines is None else logs(*lines), json_too=False)["text"]
    assert ("contains no cause" if lines is not None else "there is no folder") in text and "--logs" in text


LOADING = "LOADING: net has been loading for {} s: verifying shape 31 of 90"


def test_a_worker_that_loads_is_shown_with_its_step(logs) -> None:
    found = why(logs(AT.format(1, "net_1.0", REFUSED), AT.format(2, "net_1.0", LOADING.format(40))))
    assert "net has been loading for 40 s: verifying shape 31 of 90" in found["text"]
    assert "an earlier start failed: ConfigError" in found["text"]
    assert found["loading"]["text"] == "has been loading for 40 s: verifying shape 31 of 90"


def test_a_worker_that_ended_does_not_load(logs) -> None:
    found = why(logs(AT.format(1, "net_1.0", LOADING.format(4)), AT.format(2, "net_1.0", REFUSED)))
    assert found["loading"] is None and "cause: ConfigError" in found["text"]
    found = why(logs(AT.format(1, "net_1.0", LOADING.format(4)), frontend=GONE))
    assert found["loading"] is None and "process ended" in found["text"]


def test_ready_ends_at_a_refusal_and_after_the_timeout(logs) -> None:
    later = AT.replace("2026", "9026").format(1, "net_1.0", REFUSED)
    options = ["--management", NOBODY, "--url", NOBODY, "--timeout", "1"]
    result = CliRunner().invoke(app, ["ready", "net", "--logs", str(logs(later)), *options])
    assert result.exit_code == 1 and "cause: ConfigError" in result.output and "after 1 s" not in result.output
    old = logs(AT.format(1, "net_1.0", REFUSED), AT.format(2, "net_1.0", LOADING.format(40)))
    result = CliRunner().invoke(app, ["ready", "net", "--logs", str(old), *options])
    assert result.exit_code == 1 and "verifying shape 31 of 90" in result.output
    assert re.search(r"not ready after \d s: no server answers", result.output)


def test_ready_does_not_wait_for_a_server_that_does_not_start(logs, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has the command under the module's name.
    monkeypatch.setattr(sys.modules["torchserve_openvino.cli.why"], "_SECONDS_FOR_A_SERVER", 0.5)
    start = time.monotonic()
    result = CliRunner().invoke(app, ["ready", "net", "--logs", str(logs()), "--management", NOBODY, "--url", NOBODY])
    assert result.exit_code == 1 and "no server answers" in result.output and time.monotonic() - start < 20


def at(time: str, worker: str, text: str) -> str:
    return f"{time},001 [INFO ] W-9000-{worker}-stdout MODEL_LOG - {text}"


def test_a_cause_of_another_day_is_not_that_of_the_last_end(logs) -> None:
    old = at("2026-11-21T09:00:00", "net_1.0", REFUSED)
    assert "process ended" in why(logs(old, frontend=GONE))["cause"]["text"]
    traceback = at("2026-11-21T09:00:00", "net_1.0", "RuntimeError: of a request")
    assert "process ended" in why(logs(traceback, frontend=GONE))["cause"]["text"]
    # What the frontend logs of the same end comes after it.
    same = at("2026-11-22T21:55:56", "net_1.0", REFUSED)
    assert "ConfigError" in why(logs(old, same, frontend=GONE))["cause"]["text"]


def test_a_version_has_its_own_cause(logs) -> None:
    folder = logs(AT.format(1, "net_1.0", REFUSED), AT.format(2, "net_2.0", REFUSED.replace("wormup", "batsching")))
    assert "wormup" in why(folder, "net/1.0")["cause"]["text"]
    assert "batsching" in why(folder, "net/2.0")["cause"]["text"]
    assert why(folder, "net/3.0")["cause"] is None


def test_logs_that_cannot_be_read_are_named(logs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = logs(AT.format(1, "net_1.0", REFUSED))
    assert "there is no folder" in why(folder / "model_log.log", json_too=False)["text"]

    def denied(path: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert "model_log.log cannot be read: Permission denied" in why(folder, json_too=False)["text"]


def test_ready_of_all_models_ends_at_a_refusal_too(logs) -> None:
    later = AT.replace("2026", "9026").format(1, "net_1.0", REFUSED)
    options = ["--management", NOBODY, "--url", NOBODY, "--timeout", "30"]
    result = CliRunner().invoke(app, ["ready", "--logs", str(logs(later)), *options])
    assert result.exit_code == 1 and "cause: ConfigError" in result.output and " after " not in result.output
