"""The capture of a call that is to be frozen: the whole of it in one graph, or not at all.

What runs in Python beside a graph can look at values and act upon them, and a frozen call leaves it out. Torch promises
with ``fullgraph=True`` that no part of a traced frame runs elsewhere. Two ways around that promise are closed here:
a frame that is not traced at all (`entire` notices), and values that a graph hands to Python or takes from its random
numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from torchserve_openvino.backend.routes.frozen import NotWholeError
from torchserve_openvino.backend.upstream import _torch_private as private

_REASON_CHARACTERS = 300


def capture_whole(
    model: Callable[..., Any],
    backend: Callable[..., Any],
    observer: private.FrameObserver,
    around: Callable[[], AbstractContextManager[None]],
    **limits: Any,
) -> Callable[..., Any]:
    """The model through ``torch.compile``, raising wherever a call can't be captured whole.

    Args:
        model: The model.
        backend: For the graph.
        observer: Called for the frame.
        around: Surrounds its tracing.
        **limits: Further arguments of ``torch.compile``.
    """

    place = _place_of(model)

    def checked(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        if reason := private.reads_values(gm):
            raise NotWholeError(reason)
        return backend(gm, example_inputs, place)

    def entire(*args: Any, **kwargs: Any) -> Any:
        # True where Dynamo traces; what runs in Python instead stops before it did anything. (`is_compiling` would also
        # be true while another thread compiles.)
        if not torch.compiler.is_dynamo_compiling():
            raise NotWholeError("Dynamo did not trace the call")
        return model(*args, **kwargs)

    # Dynamo counts compilations by code object: models are not to share one.
    entire.__code__ = entire.__code__.replace()
    compiled = torch.compile(entire, backend=checked, fullgraph=True, **limits)
    private.watch_frames(compiled, observer, place=place, keeps_going=False, around=around)
    return compiled


def why_not_whole(error: Exception) -> str:
    """The reason in an error of such a capture, on one line."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else type(inner).__name__
    return f"not one graph: {text}"[:_REASON_CHARACTERS]


def _place_of(model: Callable[..., Any]) -> str:
    function = getattr(model, "forward", model)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code is not None else type(model).__name__
