"""A stand-in for ``self.model`` in a handler, with its attributes, container methods and class (`isinstance`)."""

from collections.abc import Callable
from typing import Any

from torch import nn

from torchserve_openvino.backend.capture.model_proxy import attribute_of

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
