"""What a worker does between its start and READY: named in the log at least every five seconds.

Loading a model may take minutes, most of them in calls of torch and OpenVINO that write nothing. `loading` starts a
thread that logs the current step. Code below it calls `begin_step` to name the step, and `keep_report` to leave what is
known of the model in case it is refused. Outside `loading`, and in other threads, both do nothing.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from torchserve_openvino.report.compile_report import CompileReport

logger = logging.getLogger(__name__)

# Less than the five seconds that the log promises: the thread may wait for Python's lock.
SECONDS_BETWEEN = 3.0


class LoadProgress:
    """The load of one model.

    Args:
        name: The model's name.

    Attributes:
        report: What is known of the model so far; None before anything was compiled.
    """

    def __init__(self, name: str) -> None:
        self.report: CompileReport | None = None
        self._name = name
        self._start = time.monotonic()
        self._step = "starting"
        self._over = threading.Event()

    def set_step(self, text: str) -> None:
        """Names what is done now."""
        self._step = text

    def log(self) -> None:
        """Logs the current step, in the form that `torchserve-openvino why` reads."""
        logger.info(
            "LOADING: %s has been loading for %.0f s: %s", self._name, time.monotonic() - self._start, self._step
        )

    def log_until_over(self, seconds_between: float) -> None:
        """Logs the current step regularly, until `end`."""
        while not self._over.wait(seconds_between):
            self.log()

    def end(self) -> None:
        """Ends the log."""
        self._over.set()


_load: ContextVar[LoadProgress | None] = ContextVar("load", default=None)


@contextlib.contextmanager
def loading(name: str, seconds_between: float = SECONDS_BETWEEN) -> Iterator[LoadProgress]:
    """Logs what is done in the block.

    Args:
        name: The model's name.
        seconds_between: Time between two lines.
    """
    load = LoadProgress(name)
    token = _load.set(load)
    load.log()
    thread = threading.Thread(target=load.log_until_over, args=(seconds_between,), name="load progress", daemon=True)
    thread.start()
    try:
        yield load
    finally:
        load.end()
        thread.join()
        _load.reset(token)


def begin_step(text: str, position: int | None = None, total: int | None = None) -> None:
    """Names what is done now.

    Args:
        text: For the user, such as ``verifying``.
        position: Number of the current item, from 1.
        total: Number of items, if that is known.
    """
    if (load := _load.get()) is None:
        return
    count = "" if position is None else f" {position}" + (f" of {total}" if total is not None else "")
    load.set_step(f"{text}{count}")


def keep_report(report: CompileReport) -> None:
    """Keeps a report, so that it can be shown if the model is refused."""
    if (load := _load.get()) is not None:
        load.report = report
