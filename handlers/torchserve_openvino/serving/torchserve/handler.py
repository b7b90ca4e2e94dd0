"""`HandlerBase`: lets TorchServe's calls of a handler pass through its `Worker`."""

import types
from abc import ABC, ABCMeta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchserve_openvino.serving.loading.wrapped import wrapped_class
from torchserve_openvino.serving.method_compiler import MethodCompiler
from torchserve_openvino.serving.torchserve.base import BaseHandler
from torchserve_openvino.serving.torchserve.calls import answered_call
from torchserve_openvino.serving.torchserve.envelope_classes import take_over
from torchserve_openvino.serving.worker.worker import Worker

# Methods that TorchServe calls from outside, and that this package has to enter first.
_ENTRIES = frozenset({"handle", "initialize"})


class _HandlerType(ABCMeta):
    """The type of handlers: puts the methods of all the user's classes before those of TorchServe's BaseHandler."""

    def mro(cls) -> list[type]:
        """Returns the order of classes, with BaseHandler last: a user's class need not derive from it."""
        order = super().mro()
        last = [each for each in order if each in {BaseHandler, ABC, object}]
        return [each for each in order if each not in last] + last


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

        What the handler's other bases describe is in it, under ``handler``; its keys are also at the top, where the
        report has no key of that name.
        """
        own, report = super().describe_handle(), self._openvino.describe()
        if own is None:
            return report
        return {**(own if isinstance(own, dict) else {}), **report, "handler": own}

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
