"""Keeps operators whole that torch decomposes before any backend sees them, or that Python code computes.

torch's tracer unrolls a recurrent layer step by step, and makes resizing (`interpolate`) of lookups at single pixels.
While one of our models is traced, each such operator is replaced by an opaque one with the same arguments that torch
cannot decompose (`OPAQUE_OPS`). `restore_original_ops` puts the operator itself back into the lowered graph, so that
all later stages see torch's own name. `BATCHED_NMS` is the exception: a function of torchvision, which branches on
sizes that only exist when the model runs.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, library
from torch.fx import Graph

from torchserve_openvino.ops.memory_order import example_strides

aten = torch.ops.aten
_LIBRARY = library.Library("openvino_kept", "DEF")
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


@dataclass(frozen=True)
class OpaqueOp:
    """What is traced in an operator's place.

    Attributes:
        call: Takes the operator's arguments; returns NotImplemented where torch's decomposition is traced instead.
        trains: Whether that decomposition is traced where gradients are recorded, for which an opaque operator has no
            formula.
            Otherwise Dynamo breaks the graph there: torch's decomposition of recurrent layers has no dropout.
        own: Whether only this package's conversion is right, so that it stays whole only where that is used.
        always: Whether it is traced where gradients are recorded, too.
    """

    call: Callable[..., Any]
    trains: bool = False
    own: bool = False
    always: bool = False


def _define(op: Any, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Any = ()) -> Any:
    """Defines a single operator with arguments and results by ``schema``, and returns it."""
    name = str(op).split(".")[1]
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    defined = getattr(torch.ops.openvino_kept, name).default
    library.register_fake(defined, fake, lib=_LIBRARY)
    return defined


# --- recurrent layers ---------------------------------------------------------------------------------------------


def _outputs(
    x: Tensor, states: list[Tensor], params: list[Tensor], layers: int, both: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Returns new tensors with the shapes and strides of torch's outputs."""
    rows, columns = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    features = states[0].shape[2] * (2 if both else 1)
    y = x.new_empty([rows, columns, features])
    return y.transpose(0, 1) if batch_first else y, *(x.new_empty(state.shape) for state in states)


def _fake_lstm(
    x: Tensor, hx: list[Tensor], params: list[Tensor], biases: bool, layers: int, dropout: float, train: bool,
    both: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _outputs(x, hx, params, layers, both, batch_first)


def _fake_rnn(
    x: Tensor, hx: Tensor, params: list[Tensor], biases: bool, layers: int, dropout: float, train: bool, both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _outputs(x, [hx], params, layers, both, batch_first)


def _define_recurrent(op: Any, states: str, count: int, fake: Any) -> Any:
    """Defines the opaque operator of a recurrent layer, which runs torch's own."""
    returned = ", ".join(["Tensor"] * count)

    def run(*args: Any) -> Any:
        # One of the operator's outputs may be a view of another, which a custom operator must not return.
        return tuple(result.clone() for result in op(*args))

    schema = f"(Tensor input, {states} hx, {_ARGUMENTS}) -> ({returned})"
    return _define(op, schema, run, fake, tags=(torch.Tag.nondeterministic_seeded,))


def _without_idle_dropout(opaque: Any) -> Any:
    """Wraps an opaque operator so that dropout, which may be a symbol, counts in training mode only."""

    def call(x: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
             bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
        probability = float(dropout) if train else 0.0
        return opaque(x, hx, params, has_biases, num_layers, probability, train, bidirectional, batch_first)

    return call


_RECURRENT: dict[Any, Any] = {
    aten.lstm.input: _define_recurrent(aten.lstm.input, "Tensor[]", 3, _fake_lstm),
    aten.gru.input: _define_recurrent(aten.gru.input, "Tensor", 2, _fake_rnn),
    aten.rnn_tanh.input: _define_recurrent(aten.rnn_tanh.input, "Tensor", 2, _fake_rnn),
    aten.rnn_relu.input: _define_recurrent(aten.rnn_relu.input, "Tensor", 2, _fake_rnn),
}


# --- resizing -----------------------------------------------------------------------------------------------------

# Whose values OpenVINO resizes.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def new_sizes(spatial: Sequence[int], output_size: Sequence[int] | None, factors: Sequence[float] | None) -> list[int]:
    """Returns the sizes after resizing, without batch and channels."""
    return list(output_size or [_scaled(size, factor) for size, factor in zip(spatial, factors or (), strict=True)])


def _scaled(size: int, factor: float) -> int:
    """Multiplies a size, rounding down; a symbol stays one, which a product with a float would not."""
    if isinstance(size, int) or not is_binary(factor):
        return int(size * factor)
    exact = Fraction(factor)
    return size * exact.numerator // exact.denominator


def is_binary(factor: Any) -> bool:
    """Returns True if the products of a factor with all sizes up to 2^16 are exact in float32."""
    return isinstance(factor, float) and 0 < factor <= 64 and (factor * 256).is_integer() and factor * 256 < 256**2


def has_open_sizes(x: Tensor, output_size: Sequence[int] | None, factors: Sequence[float] | None) -> bool:
    """Returns True if a resizing's old or new sizes are symbols."""
    return not all(
        isinstance(number, (int, float)) for number in (*x.shape[2:], *(output_size or ()), *(factors or ()))
    )


def resizes_whole(x: Tensor, output_size: Sequence[int] | None, factors: Sequence[float] | None) -> bool:
    """Returns True if a resizing is converted as one operator (`ops.rules.images`)."""
    if x.dtype not in _FLOATS:
        return False
    spatial = x.shape[2:]
    if has_open_sizes(x, output_size, factors):
        known = [size for size in (*spatial, *(output_size or ())) if isinstance(size, int)]
        return all(map(is_binary, factors or ())) and min(known, default=1) > 0
    sizes = new_sizes(spatial, output_size, factors)
    # OpenVINO multiplies in float32, and adds 1e-6 before it rounds down.
    resized = [
        math.floor(np.float32(size) * np.float32(by) + 1e-6) for size, by in zip(spatial, factors or (), strict=False)
    ]
    return min(*spatial, *sizes) > 0 and resized == (sizes if factors else [])


def is_ambiguous(op: Any, x: Tensor, factors: Sequence[float] | None) -> bool:
    """Returns True if torch's kernels disagree on which value is the nearest one.

    Some of them only copy or double values where a factor such as 1.1 or 2.2 comes to that, others go by the factor
    (aten/src/ATen/native/UpSample.h, ``nearest_idx``).
    """
    if "upsample_nearest" not in str(op) or "exact" in str(op):
        return False
    return any(_differs(size, factor) for size, factor in zip(x.shape[2:], factors or (), strict=False))


def _differs(size: Any, factor: Any) -> bool:
    if not isinstance(size, int) or not isinstance(factor, float):
        return not isinstance(factor, float) or 1 < factor < 1.5 or 2 < factor < 2.5
    new, step = int(size * factor), np.float32(1.0 / factor)
    if new not in {size, 2 * size}:
        return False
    by_factor = np.floor(np.arange(new, dtype=np.float32) * step)
    return not np.array_equal(np.minimum(by_factor, size - 1), np.arange(new) // max(1, new // max(1, size)))


def _is_channels_last(x: Tensor) -> bool:
    """Returns True if torch's kernels give their result channels-last memory (c10/core/MemoryFormat.h)."""
    if x.dim() not in {4, 5}:
        return False
    (strides, sizes), least = example_strides(x), 0
    for i in (1, *range(x.dim() - 1, 1, -1), 0):
        if sizes[i] == 0 or strides[i] < least or (i == 0 and least == strides[1]):
            return False
        least = strides[i] * (sizes[i] if sizes[i] > 1 else 1)
    return True


def _fake_resized(x: Tensor, output_size: Sequence[int] | None, *options: Any) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats[x.dim()] if _is_channels_last(x) else torch.contiguous_format
    sizes = new_sizes(x.shape[2:], output_size, options[-1])
    return torch.empty([*x.shape[:2], *sizes], dtype=x.dtype, device=x.device, memory_format=memory_format)


def _where_whole(op: Any, opaque: Any) -> Callable[..., Any]:
    def call(x: Tensor, output_size: Sequence[int] | None, *options: Any) -> Any:
        in_bytes = x.dtype is torch.uint8 and op in _IN_BYTES
        whole = in_bytes or is_ambiguous(op, x, options[-1]) or resizes_whole(x, output_size, options[-1])
        return opaque(x, output_size, *options) if whole else NotImplemented

    return call


RESIZERS = (
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec,
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
    aten.upsample_bicubic2d.vec,
)  # fmt: skip
# Of bytes, eager PyTorch's kernels count in integers; torch's decompositions differ by 1. Eager PyTorch runs them.
_IN_BYTES = frozenset({aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec})
# From a schema's first bracket on, it is that of the operator.
_RESIZERS = {op: _define(op, "(" + str(op._schema).partition("(")[2], op, _fake_resized) for op in RESIZERS}


# --- a loss that torch decomposes wrongly --------------------------------------------------------------------------


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Sums max(0, 1 - x[label] + x[class]) / classes over an item's labels and all classes that are no labels of it.

    Labels end at the first -1. torch's decomposition goes on behind it (tests/contract/test_torch.py).

    Args:
        x: ``[N, C]`` or ``[C]``.
        target: Labels, of the same shape.
        reduction: 0 for a loss for each item, 1 for their mean, 2 for their sum.
    """
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    places = torch.arange(classes, device=x.device)
    first_end = torch.amin(torch.where(labels == -1, places, classes), -1, True)
    is_before_end = places < first_end
    is_label = torch.any(places == torch.where(is_before_end, labels, -1).unsqueeze(-1), 1)
    of_labels = torch.gather(rows, 1, torch.where(is_before_end, labels, 0))
    margins = (1 - of_labels.unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0) / classes
    counts = is_before_end.unsqueeze(-1) & is_label.logical_not().unsqueeze(1)
    loss = torch.where(counts, margins, 0.0).sum((1, 2))
    loss = (loss.reshape(x.shape[:-1]), loss.mean(), loss.sum())[reduction]
    return loss, is_label.to(x.dtype).reshape(target.shape)


def _idle_dropout(x: Tensor, p: float, train: bool) -> Any:
    """Returns the input itself, as torch does; torch traces a copy, so that later writes would not reach the input."""
    return x if not train or p == 0 else NotImplemented


# Maps each operator to what is traced in its place.
OPAQUE_OPS = {op: OpaqueOp(_without_idle_dropout(opaque)) for op, opaque in _RECURRENT.items()} | {
    op: OpaqueOp(_where_whole(op, opaque), trains=True, own=True) for op, opaque in _RESIZERS.items()
}
OPAQUE_OPS[aten.dropout.default] = OpaqueOp(_idle_dropout, always=True)
OPAQUE_OPS[aten.multilabel_margin_loss_forward.default] = OpaqueOp(multilabel_margin_loss)
_ORIGINALS = {opaque: op for op, opaque in (_RECURRENT | _RESIZERS).items()}


def restore_original_ops(graph: Graph) -> None:
    """Puts torch's operators back in place of the opaque ones."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ORIGINALS:
            node.target = _ORIGINALS[node.target]
            # Otherwise the report would call it decomposed.
            node.meta["original_aten"] = node.target


# --- torchvision's suppression of overlapping boxes ---------------------------------------------------------------


def _batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float, autocast: bool) -> Tensor:
    # torchvision is imported: its function was traced. With autocast, its kernel gets float32.
    with torch.autocast("cpu", enabled=autocast):
        indices: Tensor = sys.modules["torchvision.ops.boxes"].batched_nms(boxes, scores, idxs, iou_threshold)
    return indices


def _fake_batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float, autocast: bool) -> Tensor:
    return boxes.new_empty([library.get_ctx().new_dynamic_size()], dtype=torch.int64)


_LIBRARY.define("batched_nms(Tensor boxes, Tensor scores, Tensor idxs, float iou_threshold, bool autocast) -> Tensor")
_LIBRARY.impl("batched_nms", _batched_nms, "CompositeExplicitAutograd")
BATCHED_NMS = torch.ops.openvino_kept.batched_nms.default
library.register_fake(BATCHED_NMS, _fake_batched_nms, lib=_LIBRARY)
