"""Tells torch which sizes a graph must keep symbolic; uses torch's private modules.

torch 2.13: ``maybe_mark_dynamic`` is documented, but not in a public module; tracing a size of 1 like any other size is
an experimental setting, which torch.export uses (tests/contract/test_dynamo.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.fx.experimental import _config as shape_config

from torchserve_openvino.backend.spec import OpenAxes

# Attributes that torch sets on a marked tensor: the set of axes, and a flag that there is one.
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def marking(call: Callable[..., Any], open_axes: OpenAxes) -> Callable[..., Any]:
    """Wraps a compiled model so that its inputs are marked during each call, since any call may have to be traced.

    The marks are removed afterwards, or another model compiled on the same tensors would see them.
    """

    def marked(*args: Any, **kwargs: Any) -> Any:
        values = [(_named(name, args, kwargs), axes) for name, axes in open_axes.axes.items()]
        # A tensor that is already marked keeps its marks.
        tensors = [
            (value, axes) for value, axes in values
            if isinstance(value, torch.Tensor) and value.dim() > max(axes) and not hasattr(value, _MARKS[1])
        ]  # fmt: skip
        try:
            for tensor, axes in tensors:
                maybe_mark_dynamic(tensor, axes)
            return call(*args, **kwargs)
        finally:
            for tensor, _ in tensors:
                for name in _MARKS:
                    vars(tensor).pop(name, None)

    return marked


def _named(name: str | int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(name, str):
        return kwargs.get(name)
    return args[name] if name < len(args) else None


def open_ones(tracing: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Combines ``tracing`` with a context in which a size of 1 is treated like any other size."""

    @contextmanager
    def both() -> Iterator[None]:
        # `patch` is added to the module at import, where mypy does not see it.
        with tracing(), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield

    return both
