"""Deaths of OpenVINO's compiler: what a process leaves behind, what the next one makes of it, and real crashes."""

import faulthandler
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import torch
from openvino import opset13 as ops

import torchserve_openvino as tov
from torchserve_openvino.backend.runtime import build as build_module
from torchserve_openvino.backend.runtime.crashes import journal as journal_module
from torchserve_openvino.backend.runtime.crashes.compile_trial import trial_of_model
from torchserve_openvino.backend.runtime.crashes.journal import CompileAdvice, Journal, Mode, Subject, subject_of_model
from torchserve_openvino.backend.runtime.crashes.survive import survive
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.cache.open import STATE_ENV, state_folder
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import CompileDiedError

SUBJECT = Subject("a" * 32, "graph 0 / openvino_0", {"MatMul": 3, "Swish": 1})
MODES: list[Mode] = ["normal", "unfused", "eager"]


def forked(action: Callable[[], Any]) -> int:
    """Runs something in a child process, and returns how it ended: its exit code, or minus the signal."""
    child = os.fork()
    if not child:
        # pytest's; the deaths here are expected.
        faulthandler.disable()
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(folder: Path, mode: Mode = "normal", by: int = signal.SIGKILL, subject: Subject = SUBJECT) -> None:
    """Leaves the marker of a process that died."""

    def compile_and_die() -> None:
        with Journal(folder).compiling(subject, mode):
            os.kill(os.getpid(), by)

    assert forked(compile_and_die) == -by


class Compiler:
    """Stands for OpenVINO's compiler.

    Args:
        ends_by: For each mode, the signal that ends a separate process; survives in others.
    """

    def __init__(self, folder: Path, **ends_by: str) -> None:
        self.journal, self.ends_by = Journal(folder), ends_by
        self.runs: list[str] = []
        self.trials: list[str] = []

    def run(self, mode: Mode) -> str:
        self.runs.append(mode)
        return mode

    def trial(self, mode: Mode) -> str:
        self.trials.append(mode)
        return self.ends_by.get(mode, "")

    def __call__(self, subject: Subject = SUBJECT) -> tuple[str, str]:
        return survive(self.journal, lambda: subject, MODES, self.run, self.trial)


# --- markers --------------------------------------------------------------------------------------------------------


def test_a_marker_exists_while_something_is_compiled_and_is_private(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="refused"), Journal(tmp_path).compiling(SUBJECT, "normal"):
        (marker,) = tmp_path.iterdir()
        assert stat.S_IMODE(marker.stat().st_mode) == 0o600
        facts = json.loads(marker.read_text())
        assert (facts["name"], facts["operators"], facts["pid"]) == (SUBJECT.name, SUBJECT.operators, os.getpid())
        raise RuntimeError("refused")
    assert list(tmp_path.iterdir()) == []


def test_only_a_process_that_ended_is_dead(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def compile_until_told() -> None:
        with Journal(tmp_path).compiling(SUBJECT, "normal"):
            os.write(writing, b"x")
            time.sleep(60)

    child = os.fork()
    if not child:
        compile_until_told()
        os._exit(0)
    os.read(reading, 1)
    journal = Journal(tmp_path)
    with journal.compiling(SUBJECT, "normal"):
        # Looking at the markers must not release the lock of the own one.
        assert journal.deaths(SUBJECT.identity) == []
        forked(lambda: (tmp_path / "seen").write_text(str(len(Journal(tmp_path).deaths(SUBJECT.identity)))))
        assert (tmp_path / "seen").read_text() == "0"
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # A zombie, whose id is still in use, is dead too.
    (death,) = journal.deaths(SUBJECT.identity)
    assert (death.pid, death.mode) == (child, "normal")
    os.waitpid(child, 0)
    assert journal.deaths("b" * 32) == []


def test_a_marker_of_a_dead_process_counts_though_its_id_is_in_use_again(tmp_path: Path) -> None:
    die(tmp_path)
    (marker,) = tmp_path.iterdir()
    facts = json.loads(marker.read_text())
    marker.write_text(json.dumps({**facts, "pid": os.getpid()}))
    marker.rename(tmp_path / f"{SUBJECT.identity}.{os.getpid()}-{'0' * 16}.12345678.marker")
    assert [death.pid for death in Journal(tmp_path).deaths(SUBJECT.identity)] == [os.getpid()]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"boot": "another", "pid": 1, "mode": "normal"}'])
def test_a_marker_that_cannot_be_read_or_is_of_another_boot_is_no_evidence(tmp_path: Path, content: str) -> None:
    marker = tmp_path / f"{SUBJECT.identity}.1-2.3.marker"
    marker.write_text(content)
    assert Compiler(tmp_path, normal="SIGFPE")() == ("normal", "")
    assert not marker.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"verdict": {"mode": "else"}}', '{"verdict": 3}'])
def test_a_verdict_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    Journal(tmp_path).verdict_file(SUBJECT.identity).write_text(content)
    assert Compiler(tmp_path)() == ("normal", "")


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(tmp_path / "missing")
    assert compiler() == compiler() == ("normal", "")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "missing" in record.message


def test_old_files_and_too_many_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_KEPT_FILES", 5)
    for age in range(10):
        path = tmp_path / f"{age:032x}.verdict"
        path.write_text("{}")
        os.utime(path, (time.time() - age * 86400 * 20,) * 2)
    (tmp_path / "lock").touch()
    Journal(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"{age:032x}.verdict" for age in range(5)), "lock"]
    monkeypatch.setattr(journal_module, "_KEPT_SECONDS", 86400)
    Journal(tmp_path)
    assert len(list(tmp_path.glob("*.verdict"))) == 1


def test_where_the_journal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    store = Store(tmp_path / "cache")
    assert state_folder(store, env) == tmp_path / "cache" / "compiling"
    user = state_folder(None, env)
    assert user == tmp_path / "state" / "torchserve-openvino" / "compiling"
    assert stat.S_IMODE(user.stat().st_mode) == 0o700
    assert state_folder(store, {**env, STATE_ENV: str(tmp_path / "named")}) == tmp_path / "named"
    # A group may write to it.
    user.chmod(0o770)
    elsewhere = state_folder(None, env)
    assert elsewhere is not None and elsewhere.parent == tmp_path / "tmp"
    assert state_folder(None, {STATE_ENV: str(user)}) is None
    assert "goes unnoticed" in caplog.records[-1].message


# --- what follows ---------------------------------------------------------------------------------------------------


def test_nothing_is_tried_without_a_death(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, normal="SIGFPE")
    assert compiler() == ("normal", "") and compiler.trials == []


def test_what_dies_without_fusion_too_stays_in_eager_and_is_not_tried_again(tmp_path: Path) -> None:
    die(tmp_path, by=signal.SIGFPE)
    compiler = Compiler(tmp_path, normal="SIGFPE", unfused="SIGSEGV")
    with pytest.raises(
        CompileDiedError, match=r"\(SIGFPE\).* graph 0 / openvino_0 \(3x MatMul, 1x Swish\): not compiled again"
    ):
        compiler()
    assert (compiler.trials, compiler.runs) == (["normal", "unfused"], [])
    later = Compiler(tmp_path, normal="SIGFPE", unfused="SIGSEGV")
    with pytest.raises(CompileDiedError, match="SIGFPE"):
        later()
    assert (later.trials, later.runs) == ([], [])


def test_what_survives_without_fusion_is_compiled_so(tmp_path: Path) -> None:
    die(tmp_path, by=signal.SIGSEGV)
    for trials in (["normal", "unfused"], []):
        compiler = Compiler(tmp_path, normal="SIGSEGV")
        mode, note = compiler()
        assert (mode, compiler.trials) == ("unfused", trials)
        assert "SIGSEGV" in note and "without fusion" in note and ".verdict is deleted" in note


def test_a_process_that_was_killed_is_no_reason_to_compile_otherwise(tmp_path: Path) -> None:
    for _ in range(3):
        die(tmp_path)
        compiler = Compiler(tmp_path)
        assert compiler() == ("normal", "") and compiler.trials == ["normal"]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_trial_that_was_killed_is_not_repeated(tmp_path: Path) -> None:
    die(tmp_path)
    die(tmp_path, "trial")
    compiler = Compiler(tmp_path)
    assert compiler() == ("normal", "") and compiler.trials == []


def test_deaths_that_no_trial_shows_end_after_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Doomed(Compiler):
        def run(self, mode: Mode) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return mode

    die(tmp_path)
    assert forked(Doomed(tmp_path)) == forked(Doomed(tmp_path)) == -signal.SIGKILL
    last = Doomed(tmp_path)
    with pytest.raises(CompileDiedError, match=r"3 times, or was killed.*until a day has passed"):
        last()
    assert last.trials == []
    # A kill must not hold for good.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    assert Compiler(tmp_path)() == ("normal", "")


def test_a_death_from_before_the_verdict_does_not_change_it(tmp_path: Path) -> None:
    die(tmp_path)
    compiler = Compiler(tmp_path, normal="SIGSEGV")
    assert compiler()[0] == "unfused"
    die(tmp_path, "normal")
    assert compiler()[0] == "unfused"
    die(tmp_path, "unfused")
    with pytest.raises(CompileDiedError, match="SIGSEGV"):
        compiler()


def test_other_partitions_of_a_model_are_tried_before_they_cost_a_worker_its_life(tmp_path: Path) -> None:
    other = Subject("b" * 32, "graph 1 / openvino_0")
    die(tmp_path, by=signal.SIGFPE)
    for trials in (["normal", "unfused", "normal", "unfused"], []):
        compiler = Compiler(tmp_path, normal="SIGFPE", unfused="SIGFPE")
        for subject in (SUBJECT, other):
            with pytest.raises(CompileDiedError):
                compiler(subject)
        assert compiler.trials == trials
    # One that survives is tried once, not at each start.
    third = Subject("c" * 32, "graph 2 / openvino_0")
    for trials in (["normal"], []):
        compiler = Compiler(tmp_path)
        compiler.journal.alarmed = True
        assert compiler(third) == ("normal", "") and compiler.trials == trials
    # Later it dies after all: what was a trial then says nothing about this.
    die(tmp_path, subject=third)
    compiler = Compiler(tmp_path, normal="SIGSEGV")
    assert compiler(third)[0] == "unfused"


def test_two_workers_try_it_once(tmp_path: Path) -> None:
    die(tmp_path, by=signal.SIGFPE)

    class Slow(Compiler):
        def trial(self, mode: Mode) -> str:
            with (tmp_path / "trials").open("a") as file:
                file.write(f"{mode}\n")
            time.sleep(0.5)
            return "SIGFPE"

    def work() -> None:
        try:
            Slow(tmp_path)()
        except CompileDiedError:
            os._exit(3)

    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            work()
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [3, 3]
    assert (tmp_path / "trials").read_text().split() == ["normal", "unfused"]


# --- the real compiler ----------------------------------------------------------------------------------------------


def small(size: int = 4) -> ov.Model:
    x = ops.parameter([size], ov.Type.f32)
    return ov.Model([ops.relu(x)], [x])


def test_a_model_is_recognized_by_its_structure() -> None:
    def identity(model: ov.Model, config: dict[str, Any] | None = None, device: str = "CPU") -> str:
        return subject_of_model(model, "", device, config or {}, {}).identity

    assert identity(small()) == identity(small())
    assert (
        len(
            {
                identity(small()),
                identity(small(5)),
                identity(small(), {"NUM_STREAMS": 2}),
                identity(small(), device="GPU"),
            }
        )
        == 4
    )
    assert subject_of_model(small(), "p", "CPU", {}, {}).described == "p (1x Relu)"


def test_a_trial_survives_what_openvino_compiles_or_refuses() -> None:
    assert trial_of_model(small(), "CPU", {}, []) == ""
    assert trial_of_model(small(), "CPU", {"NO_SUCH_PROPERTY": "1"}, []) == ""


class Deadly:
    """Stands for OpenVINO's core."""

    def compile_model(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    import_model = compile_model


def test_a_blob_at_which_processes_died_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / ("d" * 64)
    blob.write_bytes(bytes(core().compile_model(small(), "CPU").export_model().getbuffer()))
    journal = Journal(tmp_path)
    assert build_module.import_blob(blob, "CPU", {}, journal).from_cache

    build_module.device_facts("CPU")
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "core", Deadly)
        assert forked(lambda: build_module.import_blob(blob, "CPU", {}, journal)) == -signal.SIGSEGV
    # It was killed from outside.
    assert build_module.import_blob(blob, "CPU", {}, journal).from_cache
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "core", Deadly)
        forked(lambda: build_module.import_blob(blob, "CPU", {}, journal))
    monkeypatch.setattr(build_module, "trial_of_file", lambda *args, **kwargs: "SIGSEGV")
    with pytest.raises(CompileDiedError, match="SIGSEGV"):
        build_module.import_blob(blob, "CPU", {}, journal)


def test_constants_that_are_computed_while_converting_are_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_ENV, str(tmp_path))

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.positions.roll(1)

    model, x = Positions(), torch.randn(5)

    def run() -> tov.CompiledModule:
        compiled = tov.compile(model, options={"min_partition_us": 0})
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        return compiled

    build_module.device_facts("CPU")
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "core", Deadly)
        assert forked(run) == -signal.SIGSEGV
    assert "constants of graph 0" in next(tmp_path.glob("*.marker")).read_text()
    monkeypatch.setattr(build_module, "trial_of_model", lambda *args: "SIGSEGV")
    (fallback,) = run().report.fallbacks
    assert fallback.kind == "compile_died" and "constants of graph 0 / openvino_0" in fallback.reason


# Crashes that this package avoids (tests/contract/test_openvino.py), as if it did not know them.
START = """
import json, sys
import torch, torchserve_openvino as tov
from torchserve_openvino.backend.runtime import build
from torchserve_openvino.backend.runtime.crashes import compile_trial

torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).eval()
build._crashes = lambda model, device: ""

def function(x):
    h = x.exp()
    return h + torch.tanh(layers(h))

class Model(torch.nn.Module):
    def forward(self, x):
        return function(x)

options = json.loads(sys.argv[1])
if options.pop("fatal", False):
    compile_trial.child.__file__ = sys.argv[2]
x = torch.randn(4, 16)
with torch.no_grad():
    compiled = tov.compile(function, options={"min_partition_us": 0, **options})
    torch.testing.assert_close(compiled(x), function(x))
report = compiled.report.to_dict()
print(json.dumps({name: report[name] for name in ("fallbacks", "notes", "summary", "cache")}))
"""
FATAL = "import os, signal; os.kill(os.getpid(), signal.SIGFPE)"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Runs `START` in a process; returns its report, or how it ended."""
    fatal = tmp_path / "fatal.py"
    fatal.write_text(FATAL)

    def run(state: bool = True, **options: Any) -> Any:
        environment = {name: value for name, value in os.environ.items() if name != STATE_ENV}
        environment |= {STATE_ENV: str(tmp_path / "state")} if state else {}
        command = [sys.executable, "-W", "ignore", "-c", START, json.dumps(options), str(fatal)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if done.returncode:
            return done.returncode
        return {**json.loads(done.stdout), "log": done.stderr}

    return run


def test_a_real_death_costs_one_process_and_then_fusion(start: Callable[..., Any]) -> None:
    assert start() == -signal.SIGSEGV
    for tried in (True, False):
        report = start()
        (note,) = report["notes"]
        assert "compiler died (SIGSEGV) compiling graph 0 / openvino_0" in note and "without fusion" in note
        assert "2x MatMul" in note and report["summary"]["coverage"] == 1.0
        assert ("separate process" in report["log"]) is tried


def test_a_real_death_that_nothing_avoids_is_a_counted_fallback(start: Callable[..., Any]) -> None:
    assert start() == -signal.SIGSEGV
    report = start(fatal=True)
    (fallback,) = report["fallbacks"]
    assert (fallback["kind"], fallback["to"], fallback["count"]) == ("compile_died", "eager", 1)
    assert "(SIGFPE) compiling graph 0 / openvino_0" in fallback["reason"] and "2x MatMul" in fallback["reason"]
    assert report["summary"]["coverage"] == 0.0
    # Its own crash is of another signal, so the verdict is what keeps this process alive.
    assert start()["fallbacks"][0]["kind"] == "compile_died"


def test_the_journal_lies_beside_the_cache_and_a_stored_blob_keeps_the_note(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    cached = {"model_caching": True, "cache_dir": str(tmp_path / "cache"), "state": False}
    assert start(**cached) == -signal.SIGSEGV
    assert list((tmp_path / "cache" / "compiling").glob("*.marker"))
    assert start(**cached)["cache"]["compiles"] == 1
    report = start(**cached)
    assert report["cache"]["imports"] == 1 and "without fusion" in report["notes"][0]


def test_a_verdict_that_names_its_mode_is_read_back(tmp_path: Path) -> None:
    journal, verdict = Journal(tmp_path), CompileAdvice("unfused", "SIGILL", time.time(), 2)
    journal.settle(SUBJECT, verdict, [])
    assert Journal(tmp_path).verdict(SUBJECT.identity) == verdict
