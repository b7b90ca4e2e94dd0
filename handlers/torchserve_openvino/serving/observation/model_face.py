"""What stands in ``self.model``'s place in a handler, and passes for it: attributes, containers, `isinstance`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from torchserve_openvino.backend.capture.stand_in import attribute_of

# Python looks these up on the class; they stand there only where the model has them, for a length of 0 means false.
_CONTAINER = ("__contains__", "__getitem__", "__iter__", "__len__", "__reversed__")


def model_face(eager: Any, call: Callable[..., Any]) -> Any:
    """The model to a handler, except that calls of it go elsewhere.

    Args:
        eager: The model.
        call: What is called instead of it, and of its ``forward``.
    """
    has = [name for name in _CONTAINER if isinstance(eager, nn.Module) and hasattr(type(eager), name)]
    kind = type(ModelFace.__name__, (ModelFace,), {name: _forwarded(name) for name in has}) if has else ModelFace
    return kind(eager, call)


class ModelFace:
    """Made by `model_face`; `type` tells it from the model, `isinstance` does not."""

    def __init__(self, eager: Any, call: Callable[..., Any]) -> None:
        # Written around `__setattr__`, which writes to the model.
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
