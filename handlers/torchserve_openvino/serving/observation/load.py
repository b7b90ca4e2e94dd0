"""The load of a model, observed: its steps and warnings in the log, and its report in a file."""

import contextlib
import contextvars
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torchserve_openvino.cache.open import PRECOMPILE_ENV, state_folder
from torchserve_openvino.errors import ModelLoadError, TorchServeOpenVINOError
from torchserve_openvino.report.progress import LoadProgress, loading
from torchserve_openvino.report.quiet import quiet_libraries
from torchserve_openvino.report.saved import save
from torchserve_openvino.serving.torchserve.base import model_name

logger = logging.getLogger(__name__)

# Environment variable of servers of which no reports are saved, such as those of the tuner: 0.
SAVES_ENV = "TORCHSERVE_OPENVINO_SAVES_REPORTS"
_saves = contextvars.ContextVar("saves reports", default=True)
_PACKAGE = __name__.partition(".")[0]


@contextlib.contextmanager
def observed_load(context: Any) -> Iterator[LoadProgress]:
    """Logs the steps of a model's load, with the level of each line; saves the report of a model that is refused.

    Raises:
        RuntimeError: This package refuses to serve the model; if the error is of another class, the message names
            that class. TorchServe reports only a RuntimeError as a failed load instead of a crashed worker.
        Exception: Any other error, unchanged.
    """
    name_levels()
    quiet_libraries()
    with loading(model_name(context)) as load:
        try:
            yield load
        except Exception as error:
            name, cause = model_name(context), f"{type(error).__name__}: {' '.join(str(error).split())}"
            # One line, before the traceback, so that it can be searched for (`torchserve-openvino why`).
            logger.error("ERROR: %s is not served. %s", name, cause)
            report = load.report.to_dict() if load.report is not None else {}
            save_report(context, {**report, "model": name}, cause)
            if not isinstance(error, TorchServeOpenVINOError):
                raise
            logger.debug("Where it was found", exc_info=True)
            # The message says what is wrong; dozens of our own stack frames would only hide it.
            refusal = error if isinstance(error, RuntimeError) else ModelLoadError(f"{type(error).__name__}: {error}")
            raise refusal.with_traceback(None) from None


@contextlib.contextmanager
def without_saving() -> Iterator[None]:
    """Saves no reports while the context lasts: a model that is loaded beside its workers is not what they serve."""
    token = _saves.set(False)
    try:
        yield
    finally:
        _saves.reset(token)


def save_report(context: Any, report: Mapping[str, Any], cause: str = "") -> None:
    """Saves a worker's report for `torchserve-openvino report`; a failure is a warning.

    Args:
        context: TorchServe's context.
        report: The report; without ``summary`` nothing was compiled.
        cause: Why the model is refused; empty if it is not.
    """
    unsaved = not _saves.get() or os.environ.get(SAVES_ENV) == "0" or PRECOMPILE_ENV in os.environ
    if unsaved or (state := state_folder(None)) is None:
        return
    version = str((getattr(context, "manifest", None) or {}).get("model", {}).get("modelVersion") or "")
    try:
        save(state, model_name(context), version, report, cause)
    except OSError as error:
        logger.warning("The report can't be saved, so `torchserve-openvino report` needs a READY worker: %s", error)


class _WithLevel(logging.Formatter):
    """Begins warnings and errors of this package with their level.

    TorchServe logs all output of a worker as INFO.

    Args:
        other: Formats the record.
    """

    def __init__(self, other: logging.Formatter) -> None:
        super().__init__()
        self._other = other

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record."""
        text = self._other.format(record)
        level = "ERROR" if record.levelno >= logging.ERROR else record.levelname
        ours = record.name.partition(".")[0] == _PACKAGE and record.levelno >= logging.WARNING
        return f"{level}: {text}" if ours and not text.startswith(f"{level}:") else text


def name_levels() -> None:
    """Makes the root logger name the level of this package's warnings, where its format does not."""
    for handler in logging.getLogger().handlers:
        formatter = handler.formatter
        plain = formatter is not None and formatter._fmt == "%(message)s"
        if formatter is not None and plain and not isinstance(formatter, _WithLevel):
            handler.setFormatter(_WithLevel(formatter))
