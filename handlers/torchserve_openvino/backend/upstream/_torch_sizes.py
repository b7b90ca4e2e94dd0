"""Tells torch which sizes a graph is to leave open; from torch's private modules.

torch 2.13: ``maybe_mark_dynamic`` is documented, but in no public module; that a size of 1 needs no graph of its own is
an experimental setting, which torch.export uses (tests/contract/test_dynamo.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic
from torch.fx.experimental import _config as shape_config

from torchserve_openvino.backend.open_axes import OpenAxes

# What torch writes on a tensor: a set of axes, and that there is one.
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def marking(call: Callable[..., Any], open_axes: OpenAxes) -> Callable[..., Any]:
    """A compiled model whose inputs are marked while it is called: any call may have to be traced.

    Marks do not stay: another model compiled on the same tensors would see them.
    """

    def marked(*args: Any, **kwargs: Any) -> Any:
        values = [(_named(name, args, kwargs), axes) for name, axes in open_axes.axes.items()]
        # Whoever marked a tensor before us has the say.
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
    """What is to surround tracing: ``tracing`` itself, and that a size of 1 is one like others."""

    @contextmanager
    def both() -> Iterator[None]:
        # `patch` is put into the module when it is imported.
        with tracing(), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield

    return both
