"""TorchServe's BaseHandler without its costly dependency; where TorchServe is not installed, a class with its steps.

BaseHandler's module imports ``openvino.torch``, OpenVINO's own torch.compile backend, which imports all of Dynamo. That
takes three seconds of each worker's start, for a backend that this package replaces.
"""

import functools
import importlib.util
import logging
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

# Hosts other than TorchServe need none of it.
HAS_TORCHSERVE = importlib.util.find_spec("ts") is not None

_UNUSED = "openvino.torch"


def _keep(record: logging.LogRecord) -> bool:
    # The module logs this because its import fails below; users of this package would misread it.
    return record.getMessage() != "OpenVINO is not enabled"


_logger = logging.getLogger("ts.torch_handler.base_handler")
_before: Any = sys.modules.get(_UNUSED)
_logger.addFilter(_keep)
if _before is None:
    # An entry of None makes Python raise ImportError for the module; BaseHandler then goes on without it.
    sys.modules[_UNUSED] = None  # type: ignore[assignment]
try:
    if TYPE_CHECKING or HAS_TORCHSERVE:
        from ts.torch_handler.base_handler import BaseHandler
    else:
        from torchserve_openvino.serving.torchserve.base_handler import BaseHandler
finally:
    _logger.removeFilter(_keep)
    if _before is None:
        del sys.modules[_UNUSED]


def worker_of(handler: Any) -> Any:
    """Returns what serves a handler's model: the only attribute of this package on it; None on other handlers."""
    return getattr(handler, "__dict__", {}).get("_openvino")


_initialize, _load_pickled = BaseHandler.initialize, BaseHandler._load_pickled_model
_load_torchscript = BaseHandler._load_torchscript_model


@functools.wraps(_initialize)
def _initialized(self: Any, context: Any) -> Any:
    """Runs upstream's `initialize`, with the types of files hidden from it where this package loads them."""
    worker = worker_of(self)
    with worker.while_base_handler_loads(context) if worker is not None else nullcontext():
        return _initialize(self, context)


@functools.wraps(_load_pickled)
def _pickled(self: Any, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
    worker = worker_of(self)
    load = partial(_load_pickled, self) if worker is None else worker.load_pickled
    return load(model_dir, model_file, model_pt_path)


@functools.wraps(_load_torchscript)
def _torchscript(self: Any, model_pt_path: str | None) -> Any:
    worker = worker_of(self)
    load = partial(_load_torchscript, self) if worker is None else worker.load_without_class
    return load(model_pt_path)


# Changed here, and not in a class in front of it, so that each method of a user's class runs, calls these by `super()`
# or by the name of BaseHandler, and changes what they return.
BaseHandler.initialize = _initialized
BaseHandler._load_pickled_model = _pickled
BaseHandler._load_torchscript_model = _torchscript


def missing_torchserve(error: ImportError) -> str:
    """Returns what to do about an import that fails because TorchServe is not installed; empty for other reasons."""
    missing = not HAS_TORCHSERVE and (error.name or "").partition(".")[0] == "ts"
    return " It needs TorchServe: pip install torchserve." if missing else ""


def model_name(context: Any) -> str:
    """Returns the model's name in TorchServe; contexts in tests have it in the manifest, or not at all."""
    manifest = getattr(context, "manifest", None) or {}
    return str(getattr(context, "model_name", "") or manifest.get("model", {}).get("modelName") or "model")


__all__ = ["HAS_TORCHSERVE", "BaseHandler", "missing_torchserve", "model_name", "worker_of"]
