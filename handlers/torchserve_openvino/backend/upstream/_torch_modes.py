"""Dispatch modes of one thread; from torch's private modules, as `_torch_private`."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

T = TypeVar("T", bound="ThreadDispatchMode")


class ThreadDispatchMode(TorchDispatchMode):
    """A mode that is on for the calling thread alone.

    torch's own also sets flags of the whole process, at which Dynamo's guards look: a request in another thread would
    miss its compiled graph, and two threads that leave in another order than they came would leave a flag set for good.
    """

    def __enter__(self: T) -> T:
        """Puts it on."""
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it off."""
        _pop_mode()


def is_innermost(mode: ThreadDispatchMode) -> bool:
    """Whether a mode is the one that the calling thread's next operator goes to first."""
    return _get_current_dispatch_mode() is mode


def keep_to_threads() -> None:
    """Makes the mode in which AOTAutograd runs each new graph once a `ThreadDispatchMode`.

    It looks whether answers of custom operators alias their inputs, and stays on for as long as that inference takes.
    """
    # It brings Dynamo with it, which a worker that starts warm does without.
    from torch._functorch._aot_autograd import runtime_wrappers

    mode: Any = runtime_wrappers._AnalyzeCustomOpInputOutputMode
    mode.__enter__, mode.__exit__ = ThreadDispatchMode.__enter__, ThreadDispatchMode.__exit__


class OperatorCount(ThreadDispatchMode):
    """Counts the operators that a thread runs in eager PyTorch, by overload; Dynamo compiles all the same.

    Args:
        count: Called with each.
    """

    # torch.cond and the like; what runs inside comes here by itself.
    supports_higher_order_operators = True

    def __init__(self, count: Callable[[Any], None]) -> None:
        super().__init__()
        self._count = count

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that Dynamo does not skip frames while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(func)
        return func(*args, **(kwargs or {}))
