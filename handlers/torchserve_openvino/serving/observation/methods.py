"""Methods of modules that the YAML names, such as `pipe.vae.decode`: their calls are compiled as a module's are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchserve_openvino.backend import eager_watch


class MethodCalls:
    """Stands on a module in a method's place, and redirects the calls that a handler's own code makes.

    It is there before anything is compiled, since Dynamo and exported graphs notice attributes that come later. Dynamo
    traces the method itself, so a model that calls the method is compiled with the module's own code.

    Args:
        method: The method.

    Attributes:
        owner: The module.
        function: The method's function.
        call: What is called instead; None for the method itself.
    """

    # It computes what the method does, so the model's identity in the cache is that without it.
    IS_TRANSPARENT = True

    def __init__(self, method: MethodType) -> None:
        update_wrapper(self, method)
        self.owner: nn.Module = method.__self__  # type: ignore[assignment]
        self.function: Callable[..., Any] = method.__func__
        self.call: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of the method."""
        if torch.compiler.is_compiling() or self.call is None or not eager_watch.is_watched():
            return self.function(self.owner, *args, **kwargs)
        return self.call(*args, **kwargs)


class MethodGraph(nn.Module):
    """A module whose `forward` is a method of another one, whose weights it shares.

    Args:
        calls: The method's calls.
        name: The method's name.
    """

    def __init__(self, calls: MethodCalls, name: str) -> None:
        super().__init__()
        self.training = calls.owner.training
        self.owner, self.function, self.name = calls.owner, calls.function, name
        # Not a child of this module, and no part of what it computes.
        self.calls = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method."""
        return self.function(self.owner, *args, **kwargs)

    def _get_name(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


class Redirected:
    """Redirects the calls of a module that a handler's own code makes; all other calls stay as they are.

    It uses the attribute in which `nn.Module.compile` keeps its compiled call (tests/contract/test_modules.py). Dynamo
    ignores it, so a model that contains the module is compiled with the module's own code.

    Args:
        module: The module; or a `MethodGraph`, whose method's calls are redirected.
        call: What is called instead.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call
        if isinstance(module, MethodGraph):
            self._before = module.calls.call
            module.calls.call = call
        else:
            self._before = module._compiled_call_impl
            module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of the module."""
        if eager_watch.is_watched():
            return self._call(*args, **kwargs)
        return self._module._call_impl(*args, **kwargs)

    def undo(self) -> None:
        """Restores the module's own calls."""
        if isinstance(self._module, MethodGraph):
            self._module.calls.call = self._before
        else:
            self._module._compiled_call_impl = self._before


@contextmanager
def outermost(modules: list[nn.Module]) -> Iterator[None]:
    """Adds each module with weights that is called inside the context, but by no other module, to ``modules``."""
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        depth += not isinstance(module, MethodGraph)
        if depth == 1 and next(module.parameters(), None) is not None and all(module is not other for other in modules):
            modules.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal depth
        depth -= not isinstance(module, MethodGraph)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def method_graph(method: Any, name: str) -> MethodGraph | None:
    """Returns the module that computes a method, and redirects nothing yet; None if it is no module's own method.

    Args:
        method: A bound method, or the `MethodCalls` that took its place before.
        name: Its name.
    """
    if isinstance(method, MethodCalls):
        return MethodGraph(method, name)
    owner = getattr(method, "__self__", None)
    if not isinstance(method, MethodType) or not isinstance(owner, nn.Module):
        return None
    # Those of every module, such as `train`, compute nothing.
    if hasattr(nn.Module, name) or getattr(owner, name, None) != method:
        return None
    calls = MethodCalls(method)
    setattr(owner, name, calls)
    return MethodGraph(calls, name)
