"""`HandlerBase`: lets TorchServe's calls of a handler pass through its `Worker`."""

import importlib
import types
from abc import ABC, ABCMeta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading.labels import own_classes
from torchserve_openvino.serving.requests.messages import EnvelopeKind
from torchserve_openvino.serving.torchserve.base import HAS_TORCHSERVE, BaseHandler, missing_torchserve, worker_of
from torchserve_openvino.serving.torchserve.calls import answered_call, with_report
from torchserve_openvino.serving.worker.worker import Worker
from torchserve_openvino.serving.worker_context import MethodCompiler

# Methods that TorchServe calls from outside, and that this package has to enter first.
_ENTRIES = frozenset({"handle", "initialize"})


class _HandlerType(ABCMeta):
    """The type of handlers: puts the methods of all the user's classes before those of TorchServe's BaseHandler."""

    def mro(cls) -> list[type]:
        """Returns the order of classes, with BaseHandler last: a user's class need not derive from it."""
        order = super().mro()
        last = [cls for cls in order if cls in {BaseHandler, ABC, object}]
        return [cls for cls in order if cls not in last] + last


class HandlerBase(BaseHandler, metaclass=_HandlerType):
    """The base of all handlers of this package: of shipped tasks, and of `OpenVINOHandler`, which users derive from.

    Attributes:
        model: A stand-in that looks like the loaded model, but whose calls run compiled.
    """

    _openvino_method_compilers: ClassVar[tuple[MethodCompiler, ...]] = ()
    _openvino_worker: ClassVar[type[Worker]] = Worker
    _openvino: Worker
    model: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Sets up the worker before any `__init__`, which a user's class may not pass on."""
        handler = super().__new__(cls)
        _attach(handler, wraps=False)
        # TorchServe wraps this handler in an envelope next, before it calls `initialize`.
        take_over()
        return handler

    def initialize(self, context: Any) -> None:
        """Loads the model; a subclass may call this, and set up what else it needs before or after.

        TorchServe calls `Worker.until_ready` instead, which runs this or a subclass's own, and then compiles
        ``self.model``.
        """
        with self._openvino.without_pt2(context):
            super().initialize(context)

    def handle(self, data: list[dict[str, Any]], context: Any) -> Any:
        """Answers a batch of requests by the handler's own steps, then sends the metrics that changed."""
        if self._openvino.is_answering:
            return super().handle(data, context)
        return answered_call(self._openvino, data, context)

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Runs the handler's explanations on the eager model: they hook into its layers and need gradients.

        Raises:
            NotExplainedError: The model is quantized, and has no gradients.
        """
        with self._openvino.explaining():
            return super().explain_handle(data_preprocess, raw_data)

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, for ``GET /models/NAME?customized=true``.

        What the handler's other bases describe is in it (`with_report`).
        """
        return with_report(super().describe_handle(), self._openvino.describe)

    def __setattr__(self, name: str, value: Any) -> None:
        # TorchServe's micro-batching assigns its own `handle`: it is kept, and called by the one of this class.
        if name in _ENTRIES:
            self._openvino.overrides[name] = value
        else:
            super().__setattr__(name, value)


def _attach(handler: Any, *, wraps: bool) -> None:
    """Gives a handler its worker, and lets TorchServe's calls pass through that.

    Args:
        handler: The handler; it is given nothing else but methods under the names of BaseHandler's.
        wraps: Whether its class was made for ``handler.openvino.wrap``.
    """
    kind = type(handler)
    worker = kind._openvino_worker(handler, HandlerBase, None if wraps else partial(_become, handler))
    attributes: dict[str, Any] = {
        "_openvino": worker, "initialize": worker.until_ready, **worker.own_code.watched_steps(),
    }  # fmt: skip
    if kind.handle is not HandlerBase.handle and not worker.is_task:
        attributes["handle"] = types.MethodType(HandlerBase.handle, handler)
    for name, value in attributes.items():
        object.__setattr__(handler, name, value)


def _become(handler: Any, folder: Path, name: str) -> None:
    """Makes a handler one of the class that ``handler.openvino.wrap`` names.

    TorchServe has taken the `handle` of this object already, so that it has to stay the same object.
    """
    wrapped = wrapped_class(folder, name, HandlerBase)
    wrapped._openvino_method_compilers = type(handler)._openvino_method_compilers
    handler.__class__ = wrapped
    # A user's class finds nothing on its object but what it sets itself.
    vars(handler).clear()
    _attach(handler, wraps=True)
    type(handler).__init__(handler)


# --- makes an OpenVINO handler of the one that ``handler.openvino.wrap`` names: a user's own, or one of TorchServe's


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
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise ModelLoadError(f"{_KEY}: {name} must define exactly one class of its own; found {names}.")
    (theirs,) = classes
    if issubclass(theirs, mixin):
        raise ModelLoadError(
            f"{_KEY}: {theirs.__name__} is an OpenVINO handler already; make {name} the archive's handler."
        )
    if missing := [step for step in _STEPS if not callable(getattr(theirs, step, None))]:
        raise ModelLoadError(f"{_KEY}: {theirs.__name__} has no method {missing[0]}, so it is no handler.")
    return type(f"OpenVINO{theirs.__name__}", (mixin, theirs), {"__module__": theirs.__module__})


# --- lets the workers of handlers answer requests in TorchServe's envelopes (`service_envelope` in config.properties)
# TorchServe 0.12's own `json` fails a whole batch for one bad request; its `kserve` and `kservev2` read only the first
# request of a batch, and TorchServe answers 503 to all when the number of answers differs. The frontend chooses the
# envelope, which wraps a handler before the handler is initialized. So `take_over` replaces the `handle` of those three
# classes, for this package's handlers; any other handler keeps upstream's. tests/contract pins what this relies on.


def take_over() -> None:
    """Lets the workers of handlers answer enveloped requests; safe to call more than once."""
    if not HAS_TORCHSERVE:
        return
    from ts.torch_handler.request_envelope.base import BaseEnvelope
    from ts.torch_handler.request_envelope.json import JSONEnvelope
    from ts.torch_handler.request_envelope.kserve import KServeEnvelope
    from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope

    kinds: tuple[tuple[Any, EnvelopeKind], ...] = (
        (JSONEnvelope, "json"), (KServeEnvelope, "kserve"), (KServev2Envelope, "kservev2"),
    )  # fmt: skip
    for cls, kind in kinds:
        cls.handle = _handle_for(kind, BaseEnvelope.handle)


def _handle_for(kind: EnvelopeKind, upstream: Any) -> Any:
    def handle(self: Any, data: list[dict[str, Any]], context: Any) -> Any:
        worker = worker_of(getattr(self._handle_fn, "__self__", None))
        return upstream(self, data, context) if worker is None else answered_call(worker, data, context, kind)

    return handle
