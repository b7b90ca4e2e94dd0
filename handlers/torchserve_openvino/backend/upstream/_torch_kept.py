"""Keeps operators whole that torch decomposes while it traces; uses torch's private modules, like `_torch_private`.

torch 2.13: Dynamo's settings are per thread; the Python kernels of a composite operator, and the function with which
encoders read a mask's values, have no public name.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
from packaging.version import Version
from torch._C import DispatchKey
from torch._dynamo import config as dynamo_config
from torch._dynamo.variables.builder import VariableBuilder
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.nn.modules import transformer

from torchserve_openvino.ops.opaque_ops import BATCHED_NMS, OpaqueOp

# --- decides which Python floats Dynamo makes inputs of a graph; uses torch's private modules, like `_torch_private`
# torch 2.13: with ``dynamic=True``, each float that a frame reads (an epsilon, a scale) becomes a float64 input,
# whatever its value at later calls (tests/contract/test_dynamo.py).


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


# --- keeps operators whole that torch decomposes while it traces; uses torch's private modules, like `_torch_private`


# How the graph will be converted; empty while torch decomposes everything.
_KEEPS_FOR: ContextVar[str] = ContextVar("keeps_for", default="")
_KEEPING: set[torch._ops.OpOverload] = set()
_KEEPING_LOCK = threading.Lock()
# A warning with keyword arguments (torch warns about masks of two types) breaks no graph. It is issued after the graph;
# torch 2.15 refuses to, so that it is left out there.
_DROPS_WARNINGS = Version(torch.__version__).release >= (2, 15)
_WARNINGS = "ignore_logging_functions" if _DROPS_WARNINGS else "reorderable_logging_functions"
_SETTINGS = {
    "allow_rnn": True,
    _WARNINGS: {warnings.warn},
    # A hook that is registered later is noticed.
    "skip_nnmodule_hook_guards": False,
    # Guards skip modules whose dictionaries did not change: checking them is a third of the time of all guards.
    "use_recursive_dict_tags_for_guards": True,
}
# The same settings as in `torch._dynamo.eval_frame.make_set_enable_dynamic` (tests/contract/test_dynamo.py).
_SHAPES: dict[bool | None, dict[str, Any]] = {
    None: {},
    True: {"assume_static_by_default": False},
    False: {"automatic_dynamic_shapes": False, "assume_static_by_default": True},
}


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Tells whether a mask is declared causal, without reading its values: it is only a hint to eager's kernels."""
    return is_causal is True


@functools.lru_cache(maxsize=1)
def take_masks() -> None:
    """Lets Dynamo trace `nn.TransformerEncoder` and `nn.TransformerDecoder` with a mask, whose values they read."""
    torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)(_is_causal)


# torchvision's functions whose results are as long as the boxes that they keep.
_SUPPRESSING = {"nms", "batched_nms"}


def suppresses_boxes(model: Any) -> bool:
    """Returns True if a method of a model's modules, or a model that is a function, calls torchvision's nms."""
    if not isinstance(model, torch.nn.Module):
        return _names_suppression(getattr(model, "__func__", model))
    classes = {base for module in model.modules() for base in type(module).__mro__} - set(torch.nn.Module.__mro__)
    return any(_names_suppression(value) for cls in classes for value in vars(cls).values())


def _names_suppression(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not _SUPPRESSING.isdisjoint(code.co_names)


def _batched_nms(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    return BATCHED_NMS(boxes, scores, idxs, iou_threshold, torch.is_autocast_enabled("cpu"))


def take_boxes() -> bool:
    """Lets Dynamo trace torchvision's `batched_nms` as one operator; returns False if torchvision is not imported."""
    boxes = sys.modules.get("torchvision.ops.boxes")
    if boxes is not None:
        _substitute(boxes.batched_nms)
    return boxes is not None


@functools.cache
def _substitute(batched_nms: Callable[..., Any]) -> None:
    torch.compiler.substitute_in_graph(batched_nms)(_batched_nms)


def keep_undecomposed(opaque_ops: Mapping[torch._ops.OpOverload, OpaqueOp]) -> None:
    """Prepares operators that torch decomposes while it traces, for use in `kept_whole`.

    Args:
        opaque_ops: Maps an operator to what is traced in its place.
    """
    with _KEEPING_LOCK:
        for op, opaque in opaque_ops.items():
            if op in _KEEPING:
                continue
            _KEEPING.add(op)
            for key in op.py_kernels.keys() & {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd}:
                op.py_kernels[key] = _kernel(op, op.py_kernels[key], opaque)
            op._dispatch_cache.clear()


def _kernel(op: torch._ops.OpOverload, apart: Callable[..., Any], opaque: OpaqueOp) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        converter, records = _KEEPS_FOR.get(), torch.is_grad_enabled()
        trains = opaque.trains and records and args[0].requires_grad and not opaque.always
        if not converter or trains or (converter == "ts" and opaque.own):
            return apart(*args, **kwargs)
        if records and not opaque.trains and not opaque.always:
            # Dynamo breaks the graph here.
            raise UnsupportedOperatorException(op)
        result = opaque.call(*args, **kwargs)
        return apart(*args, **kwargs) if result is NotImplemented else result

    return choose


@functools.lru_cache(maxsize=1)
def _ignore_conv_backends() -> None:
    """Traces convolutions without guards on sizes at which torch would choose another of its own kernels.

    Such as 20,480 samples, where oneDNN begins to pay (tests/contract/test_dynamo.py): each crossing would trace and
    compile the model again. Another kernel computes the same; only the memory order of its result may be another.
    """
    select: Any = torch._C._select_conv_backend

    @functools.wraps(select)
    def selected(value: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = getattr(getattr(value, "fake_mode", None), "shape_env", None) if _KEEPS_FOR.get() else None
        with sizes.suppress_guards() if sizes is not None else nullcontext():
            return select(value, *args, **kwargs)

    torch._C._select_conv_backend = selected


@contextmanager
def kept_whole(
    dynamic: bool | None = None, converter: str = "fx", floats: FloatValues | None = None, selects: bool = False
) -> Iterator[None]:
    """Makes Dynamo trace with this package's settings, and this thread trace opaque operators, while the context lasts.

    If gradients are recorded, torch decomposes such an operator, or Dynamo breaks the graph at it and torch runs it.

    Args:
        dynamic: As in ``torch.compile``, which would set it at each call, traced or not; None changes nothing.
        converter: How the graph will be converted: ``fx``, or ``ts``, by TorchScript.
        floats: As in `constant_floats`; None leaves the decision about floats to Dynamo.
        selects: Whether operators whose result sizes depend on values become part of the graph, instead of breaking it.
    """
    _ignore_conv_backends()
    token = _KEEPS_FOR.set(converter)
    try:
        constants = constant_floats(floats) if floats is not None else nullcontext()
        sizes = {"capture_dynamic_output_shape_ops": True} if selects else {}
        with dynamo_config.patch(_SETTINGS | _SHAPES[dynamic] | sizes), constants:
            yield
    finally:
        _KEEPS_FOR.reset(token)
