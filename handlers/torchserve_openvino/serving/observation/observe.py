"""Finds out which calls reach a model when its handler answers a request, by running samples in eager PyTorch."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.model_proxy import attribute_of
from torchserve_openvino.backend.eager_watch import Eager, EagerWatch, compiled
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.modes import SERVING, Modes
from torchserve_openvino.serving.observation.methods import MethodGraph, Redirected, outermost
from torchserve_openvino.serving.observation.parts import KEY, paths_of
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.serving.verification.sampling import copied_inputs

logger = logging.getLogger(__name__)

ROOT = "model"
# A part may call others that are not known yet; each round records the calls of those that the previous round found.
_ROUNDS = 3
_ABSENT: Any = object()


@dataclass(frozen=True)
class ObservedCall:
    """One call of a model.

    Attributes:
        name: Name of the sample that it came from.
        modes: Modes in which the handler made it.
    """

    name: str
    inputs: Inputs
    modes: Modes = SERVING


@dataclass
class Seen:
    """What running the samples showed.

    Attributes:
        calls: Calls of each model, by its path; those of ``self.model`` under ``model``.
        parts: Modules and methods that the handler calls directly, by their path.
        declared: Inputs of parts that a task declares, by path.
        measures: How a task judges parts in a narrower precision, by path.
        notes: Notes for the report.
    """

    calls: dict[str, list[ObservedCall]] = field(default_factory=dict)
    parts: dict[str, nn.Module] = field(default_factory=dict)
    declared: dict[str, Sequence[WarmupInput]] = field(default_factory=dict)
    measures: dict[str, Measure | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class UncopiedCallError(ModelLoadError):
    """A method that the YAML names is called with what a compiled one does not take."""


class Observer:
    """Runs a handler on samples, and records which modules it calls with which inputs.

    Args:
        handler: The handler, whose ``model`` is the eager one.
        eager: That model as it is compiled.
        run: Takes a batch, or whatever `observe` is given, through the handler's own code.
        parts: Modules that the handler is known to call directly.
        takes_any: Returns True for a part whose arguments of any kind are recorded, since its compiler reads them.
    """

    def __init__(
        self, handler: Any, eager: Any, run: Callable[[Any], Any], parts: Mapping[str, nn.Module],
        takes_any: Callable[[nn.Module | None], bool] = lambda part: False,
    ) -> None:  # fmt: skip
        self._handler, self._run, self._takes_any = handler, run, takes_any
        self._root = eager if isinstance(eager, nn.Module) else None
        self._paths = paths_of(handler, self._root)
        self.seen = Seen(parts=dict(parts))
        self._uncopied = ""

    def observe(self, name: str, items: Any) -> None:
        """Records the calls for one batch, even if the handler fails in the end.

        Raises:
            UncopiedCallError: A method that the YAML names is called in a way that can't be compiled.
            Exception: What the handler raises.
        """
        calls: dict[str, list[ObservedCall]] = {}
        try:
            for _ in range(_ROUNDS):
                calls.clear()
                new_parts: dict[str, nn.Module] = {}
                with self._recorders(name, calls):
                    EagerWatch(files_of(self._handler), partial(self._find, new_parts)).watch(lambda: self._run(items))
                if not new_parts:
                    break
                self.seen.parts.update(new_parts)
        finally:
            for path, some in calls.items():
                self.seen.calls.setdefault(path, []).extend(some)
            if self._uncopied:
                raise UncopiedCallError(self._uncopied)

    def _find(self, new_parts: dict[str, nn.Module], eager: Eager) -> None:
        """Adds a module that was called and is not known yet. Methods are not compiled, but what they call may be."""
        path = self._paths.get(id(eager.module))
        if path is not None and eager.module is not None and not eager.method:
            new_parts[path] = eager.module

    @contextmanager
    def _recorders(self, name: str, calls: dict[str, list[ObservedCall]]) -> Iterator[None]:
        """Records the calls of the model and of the known parts that are made inside the context."""

        def recorder(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                problem = self._write(calls, path, name, args, kwargs)
                inner: list[nn.Module] = []
                is_method = isinstance(self.seen.parts.get(path), MethodGraph)
                with compiled(), outermost(inner) if problem and is_method else nullcontext():
                    result = call(*args, **kwargs)
                if problem and is_method:
                    named = [self._paths[id(module)] for module in inner if id(module) in self._paths]
                    self._uncopied = self._uncopied or _named_instead(path, problem, named)
                elif problem:
                    self._note(f"a call of {path} by the sample {name} cannot be compiled before READY: {problem}")
                return result

            return record

        # A handler that loads other models may have no attribute of this name.
        before = getattr(self._handler, ROOT, _ABSENT)
        parts = self.seen.parts.items()
        redirected = [Redirected(module, recorder(path, module._call_impl)) for path, module in parts]
        if self._root is not None:
            self._handler.model = model_face(self._root, recorder(ROOT, self._root._call_impl))
        try:
            yield
        finally:
            for method in redirected:
                method.undo()
            if before is not _ABSENT:
                self._handler.model = before
            else:
                vars(self._handler).pop(ROOT, None)

    def _write(self, calls: dict[str, list[ObservedCall]], path: str, name: str, args: Any, kwargs: Any) -> str:
        """Records a call; returns why it can't be repeated, if so."""
        part = self.seen.parts.get(path)
        try:
            inputs = (args, dict(kwargs)) if self._takes_any(part) else copied_inputs((args, kwargs))
        except TypeError as error:
            return str(error)
        calls.setdefault(path, []).append(ObservedCall(name, inputs, Modes.of_call(args, kwargs)))
        return ""

    def _note(self, note: str) -> None:
        if note not in self.seen.notes:
            self.seen.notes.append(note)
            logger.warning("%s", note)


def _named_instead(path: str, problem: str, inner: Sequence[str]) -> str:
    advice = f"name the modules that it calls instead: {KEY}: [{', '.join(inner)}]" if inner else f"remove {path!r}"
    return f"{KEY} names {path!r}, a method that cannot be compiled as the handler calls it: {problem}; {advice}."


def files_of(handler: Any) -> list[str]:
    """Returns the source files of a handler's own classes, without those of this package."""
    files = []
    for cls in type(handler).__mro__:
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if file and not cls.__module__.startswith(("torchserve_openvino", "builtins")):
            files.append(file)
    return files


def unique(calls: Sequence[ObservedCall]) -> list[ObservedCall]:
    """Returns the first call of each shape."""
    recorded: dict[str, ObservedCall] = {}
    for call in calls:
        recorded.setdefault(_shape(call), call)
    return list(recorded.values())


def _shape(call: ObservedCall) -> str:
    leaves, spec = pytree.tree_flatten(call.inputs)
    kinds = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]
    return f"{spec} {kinds} {call.modes}"


# --- A stand-in for ``self.model`` in a handler, with its attributes, container methods and class (`isinstance`)


# Python looks these up on the class. Only those of the model are defined: a `__len__` of 0 makes an object false.
_CONTAINER = ("__contains__", "__getitem__", "__iter__", "__len__", "__reversed__")


def model_face(eager: Any, call: Callable[..., Any]) -> Any:
    """Returns a stand-in that a handler can use as the model, but whose calls go elsewhere.

    Args:
        eager: The model.
        call: What is called instead of it, and of its ``forward``.
    """
    has = [name for name in _CONTAINER if isinstance(eager, nn.Module) and hasattr(type(eager), name)]
    kind = type(ModelFace.__name__, (ModelFace,), {name: _forwarded(name) for name in has}) if has else ModelFace
    return kind(eager, call)


class ModelFace:
    """A stand-in made by `model_face`; `type` distinguishes it from the model, `isinstance` does not."""

    def __init__(self, eager: Any, call: Callable[..., Any]) -> None:
        # Bypasses `__setattr__`, which writes to the model.
        vars(self).update(_eager=eager, forward=call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on OpenVINO."""
        return self.forward(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The model's class where it is a module."""
        return type(self._eager) if isinstance(self._eager, nn.Module) else type(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_eager":
            raise AttributeError(name)
        return attribute_of(self._eager, name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._eager, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._eager, name)

    def __dir__(self) -> list[str]:
        return dir(self._eager)

    def __repr__(self) -> str:
        return repr(self._eager)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ModelFace, *args: Any) -> Any:
        return getattr(self._eager, name)(*args)

    return method
