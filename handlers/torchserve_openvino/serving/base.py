"""TorchServe's BaseHandler, imported without what it drags along.

Its module imports ``openvino.torch``, which is OpenVINO's own torch.compile backend and imports all of Dynamo: three
seconds of each worker's start, for something that this package replaces.
"""

import functools
import logging
import sys
from contextlib import nullcontext
from typing import Any

_UNUSED = "openvino.torch"


def _keep(record: logging.LogRecord) -> bool:
    # What the module says because of us, and what a user of this package would misread.
    return record.getMessage() != "OpenVINO is not enabled"


_logger = logging.getLogger("ts.torch_handler.base_handler")
_before: Any = sys.modules.get(_UNUSED)
_logger.addFilter(_keep)
if _before is None:
    # An entry of None is Python's own way to say that a module cannot be imported; BaseHandler then goes on without.
    sys.modules[_UNUSED] = None  # type: ignore[assignment]
try:
    from ts.torch_handler.base_handler import BaseHandler
finally:
    _logger.removeFilter(_keep)
    if _before is None:
        del sys.modules[_UNUSED]

_upstream = BaseHandler.initialize


@functools.wraps(_upstream)
def _initialize(self: Any, context: Any) -> Any:
    """Upstream's, inside `while_base_handler_loads` where a handler has that: between it and a user's `initialize`."""
    prepare = getattr(self, "while_base_handler_loads", None)
    with prepare(context) if prepare is not None else nullcontext():
        return _upstream(self, context)


BaseHandler.initialize = _initialize


def model_name(context: Any) -> str:
    """The model's name in TorchServe; contexts of tests have it in the manifest, or not at all."""
    manifest = getattr(context, "manifest", None) or {}
    return str(getattr(context, "model_name", "") or manifest.get("model", {}).get("modelName") or "model")


__all__ = ["BaseHandler", "model_name"]
