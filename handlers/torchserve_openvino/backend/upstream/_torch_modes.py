"""Dispatch modes of a single thread; uses torch's private modules, like `_torch_private`."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

T = TypeVar("T", bound="ThreadDispatchMode")


class ThreadDispatchMode(TorchDispatchMode):
    """A dispatch mode that is active in the calling thread only.

    torch's own modes also set process-wide flags that Dynamo's guards check: a request in another thread would miss its
    compiled graph, and two threads that exit in a different order than they entered would leave a flag set for good.
    """

    def __enter__(self: T) -> T:
        """Activates the mode."""
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Deactivates the mode."""
        _pop_mode()


def is_innermost(mode: ThreadDispatchMode) -> bool:
    """Checks whether a mode is the calling thread's innermost one, which gets each operator first."""
    return _get_current_dispatch_mode() is mode


@functools.cache
def repair_aliasing_check() -> None:
    """Makes AOTAutograd's aliasing check act like a `ThreadDispatchMode`, and pass subclasses of tensors.

    AOTAutograd runs each new graph once in this mode, which checks whether results of custom operators alias their
    inputs. It stays active for as long as that inference takes. It refuses to run any operator on a subclass of
    `torch.Tensor`, even on one that leaves the dispatch of operators to torch.
    """
    # This import loads Dynamo, which a worker that starts warm does not need.
    from torch._functorch._aot_autograd import runtime_wrappers

    mode: Any = runtime_wrappers._AnalyzeCustomOpInputOutputMode
    check = mode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = check(self, func, types, args, kwargs)
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    mode.__torch_dispatch__ = dispatch
    mode.__enter__, mode.__exit__ = ThreadDispatchMode.__enter__, ThreadDispatchMode.__exit__


def has_hooks(module: Any) -> bool:
    """Returns True if a call of the module does more than its `forward`."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or bool(torch.nn.modules.module._has_any_global_hook())


class EagerObserver(ThreadDispatchMode):
    """A mode that observes what a thread runs in eager PyTorch; Dynamo still compiles."""

    # torch.cond and the like; the operators that run inside arrive one by one.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, so that Dynamo does not skip frames while the mode is active."""
        return True


class OperatorCount(EagerObserver):
    """Counts the operators that a thread runs in eager PyTorch, by overload.

    Args:
        count: Called with each overload.
    """

    def __init__(self, count: Callable[[Any], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(func)
        return func(*args, **(kwargs or {}))
