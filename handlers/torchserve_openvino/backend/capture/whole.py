"""Captures a call that is to be frozen as one graph, or not at all.

Python code outside a graph can read values and act on them, but a frozen call skips that code. With ``fullgraph=True``
torch guarantees that no part of a traced frame runs outside its graph. Two gaps of that guarantee are closed here: a
frame that is not traced at all (`entire` detects it), and values that a graph passes to Python or takes from Python's
random numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.capture.dynamo import OpenVINOBackend
from torchserve_openvino.backend.capture.frame_log import FrameLog
from torchserve_openvino.backend.routes.frozen import NotWholeError
from torchserve_openvino.backend.upstream import _torch_private as private

_REASON_CHARACTERS = 300


class WholeCapture:
    """Captures calls of one model as whole graphs, for one set of options after another: each is traced once.

    The options may differ in nothing that the graphs depend on: in OpenVINO's properties, and in the cache. Calls with
    different options must not run at the same time.

    Args:
        model: What to trace.
        sync: Wraps the compiled form of ``model``.
        settings: The first settings.
        around: Context manager that is entered while a frame is traced.
        **limits: Further arguments of ``torch.compile``.

    Attributes:
        backend: Compiles the graphs.
    """

    _frame_log: FrameLog

    def __init__(
        self,
        model: Callable[..., Any],
        sync: Callable[[Callable[..., Any]], Callable[..., Any]],
        settings: BackendSettings,
        around: Callable[[], AbstractContextManager[None]],
        **limits: Any,
    ) -> None:
        self.backend = OpenVINOBackend(settings, model)
        self._call = sync(capture_whole(model, self.backend, self, around, **limits))

    def call_with(self, settings: BackendSettings) -> Callable[..., Any]:
        """Returns the model as it is compiled with some settings; a call raises if it is not one graph."""
        frame_log = FrameLog(settings.tracker, settings.recorder)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.backend.settings, self._frame_log = settings, frame_log
            return frame_log.run(self._call, *args, **kwargs)

        return call

    # --- the observer of frames ---------------------------------------------------------------------------------

    def compiled(self, fact: private.FrameFact) -> None:
        """See `FrameObserver`."""
        self._frame_log.compiled(fact)

    def broke(self, fact: private.GraphBreakFact) -> None:
        """See `FrameObserver`."""
        self._frame_log.broke(fact)

    def lost(self, frame: private.LostFrame, first: bool) -> None:
        """See `FrameObserver`."""
        self._frame_log.lost(frame, first)


def capture_whole(
    model: Callable[..., Any],
    backend: Callable[..., Any],
    observer: private.FrameObserver,
    around: Callable[[], AbstractContextManager[None]],
    **limits: Any,
) -> Callable[..., Any]:
    """Compiles a model with ``torch.compile``, so that calls raise if they can't be captured as one graph.

    Args:
        model: The model.
        backend: Compiles the graph.
        observer: Called for the frame.
        around: Context manager that is entered while the frame is traced.
        **limits: Further arguments of ``torch.compile``.
    """

    source = source_of(model)

    def checked(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        if reason := private.reads_values(gm):
            raise NotWholeError(reason)
        return backend(gm, example_inputs, source)

    def entire(*args: Any, **kwargs: Any) -> Any:
        # True while Dynamo traces; a call that runs in Python instead raises before it does anything. (`is_compiling`
        # would also be true while another thread compiles.)
        if not torch.compiler.is_dynamo_compiling():
            raise NotWholeError("Dynamo did not trace the call")
        return model(*args, **kwargs)

    # Dynamo counts compilations by code object, so models must not share one.
    entire.__code__ = entire.__code__.replace()
    compiled = torch.compile(entire, backend=checked, fullgraph=True, **limits)
    private.watch_frames(compiled, observer, source=source, keeps_going=False, around=around)
    return compiled


def why_not_whole(error: Exception) -> str:
    """Returns the reason in an error that such a capture raised, on one line."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else type(inner).__name__
    return f"not one graph: {text}"[:_REASON_CHARACTERS]


def source_of(model: Callable[..., Any]) -> str:
    """Returns ``file:line (function)`` of what a call of the model runs; the class's name where that is not Python."""
    function = getattr(model, "forward", model)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code is not None else type(model).__name__
