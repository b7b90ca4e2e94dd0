"""Finds in TorchServe's logs why a worker did not become READY."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

# The formats in which `serving/observation/load.py` and `report/progress.py` log it.
NOT_SERVED = re.compile(r"ERROR: (?P<model>\S+) is not served\. (?P<cause>.+)$")
_LOADING = re.compile(r"LOADING: (?P<model>\S+) (?P<text>has been loading for .+)$")
_WORKER = re.compile(
    r"^(?P<time>\S+) \[\w+ *\] W-\d+-(?P<model>.+)_(?P<version>[^_]+)-(?:stdout|stderr) MODEL_LOG - (?P<text>.*)$"
)
_FRONTEND = re.compile(r"^(?P<time>\S+) \[\w+ *\] W-\d+-(?P<model>.+)_(?P<version>[^_\s]+) \S+ - (?P<text>.*)$")
# The last line of a traceback: the exception's class and message.
_RAISED = re.compile(r"^(?P<cause>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)$")
# In the frontend's log: its own patience ended, or the connection to the worker, which did not say why.
_LATE = re.compile(
    r"Backend worker error\n\S*WorkerInitializationException: Backend worker did not respond in given time"
)
# Python and its imports took longer than the two minutes that TorchServe waits for a worker's process.
_SLOW = re.compile(r"Backend worker error\n\S*WorkerInitializationException: Backend worker startup time out")
_FAILED_LOAD = re.compile(r"^\S+ \[\w+ *\] .*(?P<text>Failed to load model:? .*)$", re.MULTILINE)
_GONE = re.compile(r"backend worker process died\., startupTimeout")
# As `backend/runtime/crashes/survive.py` writes it.
_DIED = re.compile(r"OpenVINO's compiler died.*")
# Only the end of a large log is read: it contains the cause, because TorchServe keeps restarting a failed worker.
_READ_BYTES = 16 * 1024 * 1024
# As TorchServe writes times, without the milliseconds.
NOW = "%Y-%m-%dT%H:%M:%S"
# What is logged of one end of a worker, by itself and by the frontend, is not further apart.
_ONE_END = timedelta(seconds=60)


_AFTER_A_DEATH = (
    "start the worker again, unless TorchServe does: it compiles this part in a separate process, then without fusion, "
    "or leaves it in eager PyTorch (`compile_died` in the report). To keep it on OpenVINO, change what the compiler "
    "gets: INFERENCE_PRECISION_HINT, threads, or disabled_ops (`torchserve-openvino doctor --bisect` finds them)"
)
_AFTER_A_TIMEOUT = "raise startupTimeout in model-config.yaml, or compile fewer shapes (handler.openvino.batching)"
_AFTER_A_SLOW_START = (
    "start fewer workers at a time, or give them more cores: Python and its imports come before the model"
)
_AFTER_AN_END = (
    "start the worker again, unless TorchServe does: if OpenVINO's compiler ended the process, the next one finds that "
    "out, says so here, and goes on without. Otherwise see dmesg (out of memory), and native code of your handler"
)


@dataclass(frozen=True)
class Cause:
    """Why a model is not served.

    Attributes:
        text: The cause, on one line.
        fix: What to do about it; empty if the cause already says so.
        time: When it was logged, as TorchServe writes times.
        file: The log file that contains it.
        times: How often it was logged.
        refused: Whether this package refuses the model, so that another start changes nothing.
    """

    text: str
    fix: str
    time: str
    file: str
    times: int = 1
    refused: bool = False


@dataclass(frozen=True)
class Loading:
    """What a worker that loads does.

    Attributes:
        text: For how long it has been loading, and the current step.
        time: When it was logged, as TorchServe writes times.
        file: The log file that contains it.
    """

    text: str
    time: str
    file: str


@dataclass(frozen=True)
class LogState:
    """What the logs say of a model that is not served.

    Attributes:
        cause: Why a worker ended, the last one; None if none did.
        loading: What a worker does that started since; None if none did.
    """

    cause: Cause | None = None
    loading: Loading | None = None


def read_logs(folder: Path, model: str | None) -> LogState:
    """Reads what the logs in a folder say of a model.

    Args:
        folder: TorchServe's log folder, with ``model_log.log`` and ``ts_log.log``.
        model: The model's name, or NAME/VERSION; None for what they say last of any.

    Raises:
        OSError: A log is there and cannot be read.
    """
    name = model.partition("/")[0] if model is not None else None
    ours: list[Cause] = []
    raised: list[Cause] = []
    died: list[Cause] = []
    loading: Loading | None = None
    for time, text, file in _lines(folder / "model_log.log", _WORKER, model):
        if (match := _LOADING.search(text)) and name in (match["model"], None):
            loading = Loading(match["text"], time, file)
        elif (match := NOT_SERVED.search(text)) and name in (match["model"], None):
            ours.append(Cause(match["cause"], "", time, file, refused=True))
        elif match := _DIED.search(text):
            died.append(Cause(match[0], _AFTER_A_DEATH, time, file))
        elif match := _RAISED.match(text):
            raised.append(Cause(match["cause"], _fix_of(match["cause"]), time, file))
    ended: list[Cause] = []
    for time, text, file in _lines(folder / "ts_log.log", _FRONTEND, model):
        if _LATE.search(text):
            ended.append(Cause("the worker was not READY within startupTimeout", _AFTER_A_TIMEOUT, time, file))
        elif _SLOW.search(text):
            slow = "the worker's process did not answer within TorchServe's two minutes"
            ended.append(Cause(slow, _AFTER_A_SLOW_START, time, file))
        elif _GONE.search(text):
            ended.append(Cause("the worker's process ended, and its log does not say why", _AFTER_AN_END, time, file))
    groups = [ours, died, raised, ended]
    # A compiler that died while it was tried in a separate process ended no worker.
    ends = [cause.time for group in (ours, raised, ended) for cause in group]
    if loading is not None and any(time >= loading.time for time in ends):
        loading = None
    return LogState(_last_cause(groups), loading)


def failed_load(folder: Path) -> str:
    """Returns TorchServe's last line on an archive that it did not load; empty if there is none."""
    lines = _FAILED_LOAD.findall(_end_of(folder / "ts_log.log"))
    return str(lines[-1]) if lines else ""


def _last_cause(groups: Iterable[list[Cause]]) -> Cause | None:
    """Returns the cause of the last end; of what was logged of that end, the first group's."""
    lasts = [(group[-1], group) for group in groups if group]
    newest = max((_time_of(last) for last, _ in lasts), default=datetime.min)
    # Our own message says more than the traceback after it. The frontend comes last: it sees the end of each worker.
    for last, group in lasts:
        if newest - _time_of(last) <= _ONE_END:
            return replace(last, times=sum(cause.text == last.text for cause in group))
    return None


def _time_of(cause: Cause) -> datetime:
    try:
        return datetime.fromisoformat(cause.time.partition(",")[0])
    except ValueError:
        # A log of another format.
        return datetime.min


def _end_of(path: Path) -> str:
    """Returns the end of a log; empty where there is none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _lines(path: Path, form: re.Pattern[str], model: str | None) -> Iterable[tuple[str, str, str]]:
    """Yields the time, text and file of each line that belongs to a worker of this model, as of `read_logs`."""
    name, _, version = (model or "").partition("/")
    lines = _end_of(path).splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        match = form.match(line)
        if match and name in (match["model"], "") and version in (match["version"], ""):
            # What Java raised stands below the line.
            raised = "" if form.match(following) else f"\n{following}"
            yield match["time"], f"{match['text']}{raised if form is _FRONTEND else ''}", str(path)


def _fix_of(cause: str) -> str:
    if cause.startswith(("ModuleNotFoundError", "ImportError")):
        return (
            "install it where TorchServe runs, package it with --extra-files, or name it in the archive's "
            "requirements.txt (install_py_dep_per_model=true)"
        )
    if cause.startswith("MemoryError"):
        return "start fewer workers, or use a machine with more memory"
    return "see the traceback above it in the log"


def deaths_in(report: Mapping[str, Any]) -> list[str]:
    """Returns what a report says about deaths of OpenVINO's compiler, a sentence for each partition."""
    texts = [
        *(str(fallback.get("reason")) for fallback in report.get("fallbacks", ())),
        *map(str, report.get("notes", ())),
    ]
    return [text for text in texts if _DIED.match(text)]
