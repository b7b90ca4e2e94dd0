"""Decides which Python floats Dynamo makes inputs of a graph; uses torch's private modules, like `_torch_private`.

torch 2.13: with ``dynamic=True``, each float that a frame reads (an epsilon, a scale) becomes a float64 input, whatever
its value at later calls (tests/contract/test_dynamo.py).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo.variables.builder import VariableBuilder

# The first value of each float that a compiled model read, by the frame's code and Dynamo's name of the float.
FloatValues = dict[tuple[CodeType, str], float]
_VALUES: ContextVar[FloatValues | None] = ContextVar("float_values", default=None)


@contextmanager
def constant_floats(values: FloatValues) -> Iterator[None]:
    """Makes this thread trace floats as constants while the context lasts, but for those whose value has changed.

    A changed value is recompiled once, with the float as an input, as Dynamo does it for ``dynamic=None``.

    Args:
        values: What this compiled model has read before; updated.
    """
    _replace_wrapper()
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


@functools.lru_cache(maxsize=1)
def _replace_wrapper() -> None:
    wrap: Any = VariableBuilder.wrap_symfloat

    @functools.wraps(wrap)
    def wrapped(builder: Any, value: float) -> Any:
        values = _VALUES.get()
        if values is None:
            return wrap(builder, value)
        constant = values.setdefault((builder.tx.f_code, builder.name), value) == value
        with dynamo_config.patch(specialize_float=constant):
            return wrap(builder, value)

    builders: Any = VariableBuilder
    builders.wrap_symfloat = wrapped
