"""Detects eager computation outside every compiled call, while a handler's own code or a model's method runs.

A handler may call more than ``self.model``: a method such as ``generate``, a submodule, a second model, a function on
weights. All of these compute with parameters, so an operator that takes a parameter outside every compiled call is part
of such a computation. A dispatch mode around the handler's steps sees it; compiled calls suspend the mode.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.backend.upstream._torch_modes import EagerObserver, is_innermost
from torchserve_openvino.ops.rule_registry import computes

T = TypeVar("T")

_PACKAGE = str(Path(__file__).resolve().parents[1])
# The methods of nn.Module between a call and its `forward`.
_CALLS = frozenset({"_wrapped_call_impl", "_call_impl"})


@dataclass
class Eager:
    """One eager computation: a call of a module, of a module's method, or an operator on weights.

    Attributes:
        module: The module that the handler called; None for an operator on weights.
        method: The method that it called; empty for a call of the module itself.
        op: The first operator.
        where: ``file:line`` in the handler.
        ops: Number of operators that do work.
        seconds: From the first operator to the end of the last.
        called: The module that a method called first, if any; ``module`` itself in most.
    """

    module: nn.Module | None
    method: str
    op: str
    where: str
    ops: int = 0
    seconds: float = 0.0
    called: nn.Module | None = None


class _ThreadState(threading.local):
    mode: "_WatchMode | None" = None


_thread = _ThreadState()
_UNWATCHED = nullcontext()


class EagerWatch:
    """Watches code, in whichever threads it runs.

    Args:
        files: Source files of a handler's own classes; a computation is reported at the deepest line in them.
        on_computation: Called with each computation once it is over.
    """

    def __init__(self, files: Sequence[str], on_computation: Callable[[Eager], None]) -> None:
        self._files = frozenset(files)
        self._on_computation = on_computation

    def watch(self, run: Callable[[], T]) -> T:
        """Returns the result of ``run``; inside another `watch` of this thread, only the outer one watches."""
        if _thread.mode is not None:
            return run()
        # The frames below this one are the handler's.
        mode = _WatchMode(self._files, self._on_computation, sys._getframe())
        _thread.mode = mode
        try:
            with mode:
                return run()
        except BaseException as error:
            mode.drop(error)
            raise
        finally:
            _thread.mode = None
            mode.close()


def is_watched() -> bool:
    """Returns True if this thread runs code that is watched, outside every compiled call."""
    return _thread.mode is not None


def report_open() -> None:
    """Reports the computation that is going on in this thread, if any, instead of waiting for the next one."""
    if _thread.mode is not None:
        _thread.mode.close()


def compiled() -> AbstractContextManager[None]:
    """Suspends the watch during a compiled call, which counts its own fallbacks."""
    mode = _thread.mode
    # Most calls are not watched, and a generator costs a call as much as looking its route up.
    return _UNWATCHED if mode is None else _suspended(mode)


@contextmanager
def _suspended(mode: "_WatchMode") -> Iterator[None]:
    _thread.mode = None
    try:
        if is_innermost(mode):
            mode.__exit__()
            try:
                yield
            finally:
                mode.__enter__()
        else:
            # A mode of the handler's own was entered after it.
            mode.paused = True
            try:
                yield
            finally:
                mode.paused = False
    finally:
        _thread.mode = mode


class _WatchMode(EagerObserver):
    """The observer of one thread.

    Args:
        files: See `EagerWatch`.
        on_computation: See `EagerWatch`.
        base: The frame that runs the handler.
    """

    def __init__(self, files: frozenset[str], on_computation: Callable[[Eager], None], base: FrameType) -> None:
        super().__init__()
        self.paused = False
        self._files, self._on_computation, self._base = files, on_computation, base
        self._open: Eager | None = None
        # All that this frame calls belongs to the open computation. For an operator on weights it is the handler's
        # frame, and only what that calls at the instruction `_place` belongs to it.
        self._frame: FrameType | None = None
        self._place = -1
        self._start = 0.0
        # Storage addresses of weights of which views were taken, which are not parameters themselves.
        self._views: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and counts it if it belongs to a computation outside compiled graphs."""
        kwargs = kwargs or {}
        weighs = not self.paused and any(map(self._weighs, (*args, *kwargs.values())))
        if self.paused or (self._open is None and not weighs):
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        if self._open is not None and not self._goes_on(caller):
            self.close()
        if self._open is None:
            if not weighs:
                return func(*args, **kwargs)
            self._begin(caller, func)
        result = func(*args, **kwargs)
        assert self._open is not None
        if weighs and func.is_view:
            self._views.update(tensor.untyped_storage().data_ptr() for tensor in output_tensors(result))
        self._open.ops += computes(func)
        self._open.seconds = time.perf_counter() - self._start
        return result

    def close(self) -> None:
        """Reports the open computation, unless it did no work, as when it only takes views of weights."""
        done, self._open, self._frame = self._open, None, None
        if done is not None and done.ops:
            self._on_computation(done)

    def drop(self, error: BaseException) -> None:
        """Forgets the open computation if it raised an error, and so computed nothing."""
        raised = error.__traceback__
        while raised is not None:
            if raised.tb_frame is self._frame and self._place in (-1, raised.tb_lasti):
                self._open = None
            raised = raised.tb_next

    def _weighs(self, value: Any) -> bool:
        """Whether an argument is a weight, a view of one that was taken under this watch, or a list with either."""
        if isinstance(value, (list, tuple)):
            return any(map(self._weighs, value))
        if not isinstance(value, torch.Tensor):
            return False
        return isinstance(value, nn.Parameter) or (
            bool(self._views) and value.untyped_storage().data_ptr() in self._views
        )

    def _goes_on(self, caller: FrameType) -> bool:
        """Whether an operator still belongs to the open computation."""
        frame: FrameType | None = caller
        while frame is not None and frame is not self._base:
            if frame is self._frame:
                return self._place in (-1, frame.f_lasti)
            frame = frame.f_back
        return False

    def _begin(self, caller: FrameType, func: Any) -> None:
        stack: list[FrameType] = []
        frame: FrameType | None = caller
        while frame is not None and frame is not self._base:
            stack.append(frame)
            frame = frame.f_back
        stack.reverse()
        site, entry, module = stack[0], None, None
        for outer in stack:
            module = _module_of(outer)
            if module is not None:
                entry = outer
                break
            if outer.f_code.co_filename in self._files or site.f_code.co_filename.startswith(_PACKAGE):
                site = outer
        name = entry.f_code.co_name if entry is not None else ""
        where = f"{site.f_code.co_filename}:{site.f_lineno}"
        inner = stack[stack.index(entry) + 1 :] if entry is not None else []
        modules = (_module_of(frame) for frame in inner if frame.f_code.co_name in _CALLS)
        called = next((module for module in modules if module is not None), None)
        self._open = Eager(module, "" if name in _CALLS else name, str(func), where, called=called)
        self._frame, self._place = (entry, -1) if entry is not None else (site, site.f_lasti)
        self._start = time.perf_counter()


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs; None for any other function, which may take a module as well."""
    names = frame.f_code.co_varnames
    if not names or not frame.f_code.co_argcount or frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    first = frame.f_locals.get(names[0])
    is_method = issubclass(type(first), nn.Module) and hasattr(type(first), frame.f_code.co_name)
    return first if is_method else None
