"""A model that compiles each new shape, up to a limit; further shapes share one graph of symbolic sizes."""

import logging
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

logger = logging.getLogger(__name__)


class BoundedShapes:
    """A callable that replaces the model.

    Args:
        static: The model, compiled anew for each shape.
        make_dynamic: Makes the model compiled once for all shapes; called when it is first needed.
        limit: How many shapes `static` gets; `handler.openvino.batching.max_shapes`.
    """

    def __init__(self, static: Callable[..., Any], make_dynamic: Callable[[], Callable[..., Any]], limit: int) -> None:
        self._static, self._make_dynamic, self._limit = static, make_dynamic, limit
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call on the static model, or on the dynamic one if its shape is beyond the limit."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
        return (self._static if self._takes(key) else self._dynamic)(*args, **kwargs)

    def _takes(self, key: Any) -> bool:
        with self._lock:
            if key not in self._known and len(self._known) < self._limit:
                self._known.add(key)
            return key in self._known

    @cached_property
    def _dynamic(self) -> Callable[..., Any]:
        logger.warning(
            "More than %d shapes arrived (handler.openvino.batching.max_shapes): the others share one graph of "
            "symbolic sizes, which is compiled now. Declare lengths (batching.dims) or set batching.mode: dynamic.",
            self._limit,
        )
        return self._make_dynamic()
