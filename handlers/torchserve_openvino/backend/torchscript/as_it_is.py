"""Runs TorchScript that has no form in Python as it is, counted at each call."""

import logging
from collections.abc import Callable
from typing import Any

from torchserve_openvino.backend.torchscript.lines import UntranslatableError
from torchserve_openvino.backend.torchscript.python_form import PythonForm
from torchserve_openvino.report import Tracker
from torchserve_openvino.report.records import GraphRecord

logger = logging.getLogger(__name__)


def run_as_it_is(model: Callable[..., Any], error: UntranslatableError, tracker: Tracker) -> Callable[..., Any]:
    """Returns a function that runs a model in TorchScript, and counts each call as a fallback.

    Args:
        model: A TorchScript module, method or function.
        error: Why it has no form in Python.
        tracker: Collects the records. All operators of the inlined graph count as not on OpenVINO.
    """
    tracker.add_graph(
        GraphRecord("torchscript", error.where, "inference", ops_total=error.ops, left_out={error.op: error.ops})
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        # Counted once it has answered: a call that TorchScript rejects as well is no fallback.
        answer = model(*args, **kwargs)
        if tracker.add_fallback("conversion_failed", error.op, reason=error.reason, where=error.where):
            logger.warning("Fallback: the whole model runs in TorchScript: %s", error)
        return answer

    return run


def while_unchanged(
    call: Callable[..., Any], model: Callable[..., Any], form: PythonForm, tracker: Tracker
) -> Callable[..., Any]:
    """Returns a compiled form's call that runs the TorchScript model instead once its attributes were changed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        changed = form.stale()
        if changed is None:
            return call(*args, **kwargs)
        answer = model(*args, **kwargs)
        reason = f"the attribute {changed!r:.100} of the module was changed after it was compiled: compile it again"
        if tracker.add_fallback("conversion_failed", "whole model", reason=reason):
            logger.warning("Fallback: the whole model runs in TorchScript: %s", reason)
        return answer

    return run
