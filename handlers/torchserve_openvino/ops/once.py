"""A decomposition that uses the operator that it decomposes."""

import functools
import threading
from collections.abc import Callable
from typing import Any


def once(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the operator inside its own decomposition stay whole, so that it is not decomposed for ever."""
    inside = threading.local()

    @functools.wraps(decomposition)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "active", False):
            return NotImplemented
        inside.active = True
        try:
            return decomposition(*args, **kwargs)
        finally:
            inside.active = False

    return outermost
