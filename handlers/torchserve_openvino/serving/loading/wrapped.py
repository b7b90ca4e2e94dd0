"""Makes an OpenVINO handler of the one that ``handler.openvino.wrap`` names: a user's own, or one of TorchServe's."""

import importlib
from pathlib import Path
from typing import Any

from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading.labels import own_classes
from torchserve_openvino.serving.torchserve.base import missing_torchserve

_KEY = "handler.openvino.wrap"
_STEPS = ("initialize", "handle")


def wrapped_class(folder: Path, name: str, mixin: type) -> type[Any]:
    """Returns the named handler with our mixin in front of it.

    Args:
        folder: The unpacked archive.
        name: A Python file in it, which defines one class of its own, or a handler of TorchServe.
        mixin: `HandlerBase`.

    Raises:
        ModelLoadError: The file is missing, fails, or defines no handler or several.
    """
    is_file = is_handler_file(name)
    if is_file and not (folder / name).is_file():
        raise ModelLoadError(f"{_KEY} names {name}, which is not in the archive; package it with --extra-files.")
    try:
        module = importlib.import_module(name.removesuffix(".py") if is_file else f"ts.torch_handler.{name}")
    except ImportError as error:
        raise ModelLoadError(f"{_KEY}: {name} cannot be imported: {error}.{missing_torchserve(error)}") from error
    classes = own_classes(module)
    if len(classes) != 1:
        names = ", ".join(each.__name__ for each in classes) or "none"
        raise ModelLoadError(f"{_KEY}: {name} must define exactly one class of its own; found {names}.")
    (theirs,) = classes
    if issubclass(theirs, mixin):
        raise ModelLoadError(
            f"{_KEY}: {theirs.__name__} is an OpenVINO handler already; make {name} the archive's handler."
        )
    if missing := [step for step in _STEPS if not callable(getattr(theirs, step, None))]:
        raise ModelLoadError(f"{_KEY}: {theirs.__name__} has no method {missing[0]}, so it is no handler.")
    return type(f"OpenVINO{theirs.__name__}", (mixin, theirs), {"__module__": theirs.__module__})
