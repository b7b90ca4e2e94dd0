"""`PythonForm`: a TorchScript module as a module of Python code, with the same weights.

Dynamo, torch.export and everything after them take it as they take any module, so that the same rules decide what runs
on OpenVINO, with which checks of integers and indices. The TorchScript module stays the reference: answers are compared
with its own, and fallbacks of the whole module run it.
"""

import linecache
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchserve_openvino.backend.torchscript.lines import PythonSource, UntranslatableError
from torchserve_openvino.backend.torchscript.source_writer import write
from torchserve_openvino.backend.upstream._torch_script import attribute_of, has_script_hooks, method_of
from torchserve_openvino.ops.names import TORCHSCRIPT_SUFFIX
from torchserve_openvino.report import Tracker
from torchserve_openvino.report.records import GraphRecord


class _Read(list[tuple[Any, str, Any]]):
    """Attributes that were taken for constants: their owner, name and value."""

    # They are in the code of `forward`, so that the cache need not identify them once more.
    IS_TRANSPARENT = True


class PythonForm(torch.nn.Module):
    """Runs what a TorchScript method runs; made by `python_form`.

    Attributes:
        ops: Number of operators in the inlined graph.
    """

    ops: int

    def stale(self) -> str | None:
        """Returns which attribute of the TorchScript module was changed since; None if none was."""
        for owner, name, value in self._read:
            if not _same(attribute_of(owner, name), value):
                return str(name)
        return None

    _read: _Read


def _same(now: Any, value: Any) -> bool:
    """Returns True for the same tensor, equal plain values, and containers of these."""
    if now is value:
        return True
    if isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        return type(now) is type(value) and len(now) == len(value) and all(map(_same, now, value))
    if isinstance(value, dict):
        return type(now) is dict and now.keys() == value.keys() and all(_same(now[key], value[key]) for key in value)
    # As text, because nan does not equal itself.
    return repr(now) == repr(value)


@dataclass(frozen=True)
class ScriptedMethod:
    """A method of a TorchScript module, which is compiled by itself."""

    module: torch.jit.ScriptModule
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method in TorchScript."""
        return getattr(self.module, self.name)(*args, **kwargs)


def is_scripted(model: Any) -> bool:
    """Returns True for a scripted or traced module or function, or a method of one."""
    return isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction, ScriptedMethod))


def python_form(model: Any) -> PythonForm:
    """Returns a TorchScript module, method or function as a module of Python code.

    Raises:
        UntranslatableError: It has an operator that has no form in Python.
    """
    if isinstance(model, torch.jit.ScriptFunction):
        return _made(write(model, None), "function")
    module, name = (model.module, str(model.name)) if isinstance(model, ScriptedMethod) else (model, "forward")
    method = method_of(module, name)
    if method is None:
        raise UntranslatableError(name, "", f"the module has no method {name}")
    written = write(method, module)
    if has_script_hooks(module) and name == "forward":
        error = UntranslatableError(name, "", "the module has hooks around its forward")
        error.ops = written.count
        raise error
    return _made(written, str(getattr(module, "original_name", "") or type(module).__name__))


def identifiable(model: Any) -> Any:
    """Returns what the cache identifies a model by: the Python form of TorchScript, otherwise the model itself."""
    if not is_scripted(model):
        return model
    try:
        return python_form(model)
    except UntranslatableError:
        return model


def _made(written: PythonSource, name: str) -> PythonForm:
    text = "\n".join(written.lines) + "\n"
    # Models of the same name have lines of their own.
    file = f"{name if name.isidentifier() else 'model'}-{zlib.crc32(text.encode()):08x}{TORCHSCRIPT_SUFFIX}"
    # Python and torch look up lines here for messages; by them a node's original line is found again.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Without a name of its own, since Dynamo would import the module of that name.
    names: dict[str, Any] = dict(written.table)
    # Only names of `lines`, numbers and references to its table are in it, no text of the archive.
    exec(compile(text, file, "exec"), names)
    # Of no installed package, so that the cache identifies it by its code.
    kind = type("TorchScriptModule", (PythonForm,), {"forward": names["forward"], "__module__": "__torchscript__"})
    form: PythonForm = kind()
    for attribute, tensor in written.weights.items():
        if isinstance(tensor, torch.nn.Parameter):
            form.register_parameter(attribute, tensor)
        else:
            form.register_buffer(attribute, tensor)
    form.ops = written.count
    object.__setattr__(form, "_read", _Read(written.read))
    return form.eval()


# --- runs TorchScript that has no form in Python as it is, counted at each call -----------------------------------


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
