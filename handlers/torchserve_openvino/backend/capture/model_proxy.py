"""The proxy that takes a model's place once it is compiled: attributes and methods, copies, pickling."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchserve_openvino.errors import WeightsReleasedError

_OF_EVERY_MODULE = frozenset(dir(torch.nn.Module)) - {"forward"}


# Runs a method: gets its name, the method, and the arguments.
MethodRunner = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def attribute_of(model: Any, name: str, proxy: Any, run: MethodRunner | None = None) -> Any:
    """Returns a model's attribute; a method that returns the model (``to``, ``eval``) returns its proxy instead.

    Args:
        model: The model.
        name: The attribute.
        proxy: The proxy of the model.
        run: Runs the methods that the model's own class defines; None if they are called directly.
    """
    value = getattr(model, name)
    of_model = inspect.ismethod(value) and value.__self__ is model
    if not of_model and not (isinstance(model, torch.jit.ScriptModule) and isinstance(value, torch.ScriptMethod)):
        return value
    # Those of every module, such as `train`, compute nothing.
    computes = run is not None and isinstance(model, torch.nn.Module) and name not in _OF_EVERY_MODULE

    @functools.wraps(value)
    def instead(*args: Any, **kwargs: Any) -> Any:
        # A model that contains this one and is being captured records what the method computes.
        if computes and not torch.compiler.is_compiling():
            assert run is not None
            result = run(name, value, args, kwargs)
        else:
            result = value(*args, **kwargs)
        return proxy if result is model else result

    return instead


class ModelProxy:
    """A base class whose instances take every attribute that is not their own from their model.

    Attributes:
        eager: The model.
    """

    eager: Callable[..., Any]
    # Compiles another model in the same way; None if that is not known.
    _remake: Callable[[Any], Any] | None

    @property
    def released(self) -> bool:
        """Whether the model's weights were freed."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "eager":
            raise AttributeError(name)
        return attribute_of(self.eager, name, self, self._run_method)

    def _run_method(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method of the model, other than those of every module."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in vars(self) or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self.eager, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy of the model, compiled in the same way, with its own report."""
        return self._made_again(copy.deepcopy(self.eager, memo))

    def __copy__(self) -> Any:
        return self._made_again(self.eager)

    def _made_again(self, model: Any) -> Any:
        self._check_copyable()
        assert self._remake is not None
        remade = self._remake(model)
        return remade.freeze() if self._freezes_copies else remade

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the model and the options; unpickling compiles the model again, or loads it from the cache."""
        self._check_copyable()
        return _unpickled, (self._remake, self.eager, self._freezes_copies)

    @property
    def _freezes_copies(self) -> bool:
        raise NotImplementedError

    def _check_copyable(self) -> None:
        if self.released:
            raise WeightsReleasedError("a copy would have no weights")
        if self._remake is None:
            raise TypeError("a compiled model can be copied and pickled only if `torchserve_openvino.compile` made it")


def _unpickled(remake: Callable[[Any], Any], model: Any, freezes: bool) -> Any:
    remade = remake(model)
    return remade.freeze() if freezes else remade
