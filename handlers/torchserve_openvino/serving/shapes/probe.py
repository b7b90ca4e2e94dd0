"""Runs a model in eager PyTorch to find out whether padding, joining or cutting its inputs changes an answer.

Nothing is assumed: items may be joined in a batch, and a batch padded, only where eager's answer to each is the
same alone and together; a sequence may be padded only where eager's answer, cut back, is the same as without padding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.serving.shapes.input_spec import Inputs, Signature
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs

# float32 sums in another order differ by about 1e-6 of the largest value; a real dependence, by much more.
TOLERANCE = 1e-4
# Smaller outputs are rounding of zero.
_LEAST_SCALE = 1e-6

Axes = dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class RowFacts:
    """Whether the items of a batch are independent of each other; if not, why, and whether eager PyTorch raised."""

    joins: bool
    reason: str = ""
    raised: bool = False


def probe_rows(model: Callable[..., Any], first: Inputs, second: Inputs) -> RowFacts:
    """Checks whether two items get the same answers together as alone.

    Args:
        model: The eager model.
        first: A call with one item.
        second: Another one, of the same shapes.
    """
    if getattr(model, "training", False):
        return RowFacts(False, "the model is in training mode, where batch statistics and dropout join the items")
    leaves, spec = pytree.tree_flatten(first)
    if not all(isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == 1 for t in leaves):
        return RowFacts(False, "not every input has the batch as its first dimension")
    both = pytree.tree_unflatten(
        [torch.cat(pair) for pair in zip(leaves, pytree.tree_leaves(second), strict=True)], spec
    )
    try:
        alone = [_run(model, inputs) for inputs in (first, second)]
        together = _run(model, both)
    except Exception as error:
        # Whatever it raises, the model does not accept both a batch of one and a batch of two.
        reason = f"eager PyTorch failed on one or on two items: {str(error).strip().splitlines()[:1]}"
        return RowFacts(False, reason, raised=True)
    if not together:
        return RowFacts(False, "the model returns no tensor")
    for index, values in enumerate(zip(together, *alone, strict=False)):
        joined, *single = values
        if joined.dim() == 0 or joined.shape[0] != 2 or any(t.dim() == 0 or t.shape[0] != 1 for t in single):
            return RowFacts(False, f"output {index} does not have the batch as its first dimension")
        if not _close(joined, torch.cat(single)):
            return RowFacts(False, f"output {index} of an item depends on the other items of its batch")
    return RowFacts(True)


def refusal(model: Callable[..., Any], inputs: Inputs) -> str:
    """Returns what eager PyTorch raises for a call, on one line; empty where it answers."""
    try:
        _run(model, inputs)
    except Exception as error:
        # Any exception means that the model does not accept the call.
        return class_and_line(error)
    return ""


def probe_dims(model: Callable[..., Any], inputs: DeclaredInputs, smallest: Signature) -> tuple[Axes, dict[str, str]]:
    """Finds which output axes follow a named dimension, and for which dimensions padding would change an answer.

    Args:
        model: The eager model.
        inputs: Declared inputs that pad.
        smallest: A signature with the least batch and lengths.

    Returns:
        Dimension name to one tuple of axes per output tensor; and dimension name to reason where padding is not safe.
    """
    axes: Axes = {}
    unsafe: dict[str, str] = {}
    for name, sizes in inputs.dims.items():
        tried: dict[int, str] = {}
        # A network may have a least length, or take multiples of 16 or 32 only.
        for padded_to, length in _padded(sizes):
            call = inputs.make(Signature(smallest.batch, {**smallest.dims, name: length}))
            if not (why := refusal(model, call)):
                size = padded_to
                break
            tried[length] = why
        else:
            if tried:
                unsafe[name] = f"eager PyTorch takes none of {sorted(tried)}: {tried[max(tried)]}"
            continue
        # `fit` pads the same call to the compiled length, as it does with a request.
        fitted = inputs.fit(*call)
        plain, padded = _run(model, call), _run(model, (fitted.args, fitted.kwargs))
        grown = [_grown(a, b, length, size) for a, b in zip(plain, padded, strict=False)]
        if len(plain) != len(padded) or any(axis is None for axis in grown):
            unsafe[name] = f"an output changes its shape with {name} in another way than by its length"
            continue
        axes[name] = tuple(axis for axis in grown if axis is not None)
        for index, (a, b) in enumerate(zip(plain, cut_axes(padded, axes[name], length), strict=True)):
            if not _close(a, b):
                unsafe[name] = f"output {index} changes when {name} is padded from {length} to {size}"
    return axes, unsafe


def cut_axes(outputs: Sequence[torch.Tensor], axes: Sequence[tuple[int, ...]], length: int) -> list[torch.Tensor]:
    """Returns each output without its padding."""
    result = []
    for tensor, along in zip(outputs, axes, strict=True):
        cut = tensor
        for axis in along:
            cut = cut.narrow(axis, 0, length)
        result.append(cut)
    return result


def _padded(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields sizes with lengths that are padded to them, those first that tell most."""
    for before, size in pairwise([0, *sizes]):
        lengths = (size * 3 // 4, size * 7 // 8, size - 32, size // 2, size - 1)
        yield from ((size, length) for length in dict.fromkeys(lengths) if before < length < size)


def _run(model: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
    with torch.inference_mode():
        return output_tensors(model(*inputs[0], **inputs[1]))


def _grown(a: torch.Tensor, b: torch.Tensor, length: int, size: int) -> tuple[int, ...] | None:
    """Returns the axes that grew from ``length`` to ``size``; None where something else changed."""
    if a.dim() != b.dim():
        return None
    changed = [axis for axis in range(a.dim()) if a.shape[axis] != b.shape[axis]]
    fits = all(a.shape[axis] == length and b.shape[axis] == size for axis in changed)
    return tuple(changed) if fits else None


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    x, y = a.double(), b.double()
    finite = x[x.isfinite()]
    # Probabilities of many classes are small: the largest of an output is its scale.
    scale = max(_LEAST_SCALE, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(x, y, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)
