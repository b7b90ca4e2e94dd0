"""The load of a model names its steps in the log, and its report outlives the worker."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchserve_openvino.errors import VerificationError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.report.progress import begin_step, keep_report, loading
from torchserve_openvino.report.saved import MOST_FILES, last_saved, save
from torchserve_openvino.serving.observation.load import name_levels, observed_load


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("LOADING: ")]


def test_a_long_step_is_named_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with loading("net", seconds_between=0.02):
        assert lines(caplog) == ["LOADING: net has been loading for 0 s: starting"]
        begin_step("verifying shape", 31, 90)
        time.sleep(0.2)
    assert lines(caplog)[-1].endswith("verifying shape 31 of 90") and len(lines(caplog)) > 3
    assert "load progress" not in [thread.name for thread in threading.enumerate()]
    count = len(lines(caplog))
    begin_step("nothing is loading")
    time.sleep(0.05)
    assert len(lines(caplog)) == count


def test_the_newest_report_of_a_model_is_returned(tmp_path: Path) -> None:
    save(tmp_path, "a/b", "1.0", {"summary": {}}, "refused")
    saved = last_saved(tmp_path, "a/b")
    assert saved is not None and (saved.report, saved.cause, saved.pid) == ({"summary": {}}, "refused", os.getpid())
    assert last_saved(tmp_path, "a/b", "2.0") is None and last_saved(tmp_path, "a") is None
    assert last_saved(tmp_path, "a/b", pids={1}) is None
    save(tmp_path, "a/b", "2.0", {"summary": {"graphs": 1}})
    (one,) = (tmp_path / "reports").glob("*.json")
    assert json.loads(one.read_text())["version"] == "2.0"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"report": 3, "cause": "", "pid": 1, "time": 1, "version": ""}'])
def test_a_damaged_report_is_passed_over(tmp_path: Path, text: str) -> None:
    save(tmp_path, "net", "1.0", {})
    (tmp_path / "reports" / "net@1.report.json").write_text(text)
    saved = last_saved(tmp_path, "net")
    assert saved is not None and saved.pid == os.getpid()


def test_old_reports_are_removed(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 5):
        save(tmp_path, f"net{number}", "", {})
    assert len(list((tmp_path / "reports").iterdir())) == MOST_FILES
    assert last_saved(tmp_path, "net0") is None and last_saved(tmp_path, f"net{MOST_FILES + 4}") is not None


def test_a_refused_model_leaves_its_report_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path))
    context = SimpleNamespace(model_name="net", manifest={"model": {"modelVersion": "3"}})
    with pytest.raises(VerificationError), observed_load(context):
        keep_report(CompileReport(Tracker()))
        raise VerificationError("answers differ\nby much")
    saved = last_saved(tmp_path, "net", "3")
    assert saved is not None and saved.cause == "VerificationError: answers differ by much"
    assert saved.report["summary"]["graphs"] == 0 and saved.report["model"] == "net"
    assert "ERROR: net is not served. VerificationError: answers differ by much" in caplog.text


def test_warnings_name_their_level_where_the_format_does_not(caplog: pytest.LogCaptureFixture) -> None:
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(handler)
    try:
        name_levels()
        name_levels()
        formats = handler.format
        ours = "torchserve_openvino.serving.ready"
        assert formats(logging.makeLogRecord({"name": ours, "levelno": 30, "levelname": "WARNING", "msg": "late"})) == (
            "WARNING: late"
        )
        error = {"name": ours, "levelno": 40, "levelname": "ERROR"}
        assert formats(logging.makeLogRecord({**error, "msg": "ERROR: net"})) == "ERROR: net"
        assert formats(logging.makeLogRecord({**error, "name": "other", "msg": "theirs"})) == "theirs"
        assert formats(logging.makeLogRecord({"name": ours, "levelno": 20, "msg": "all well"})) == "all well"
    finally:
        root.removeHandler(handler)
