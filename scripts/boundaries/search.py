"""Finds the sizes at which the kernels of a form change, and compares both sides of each with eager PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import torchserve_openvino as tov
from boundaries.forms import Form
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.backend.runtime.build import kernels_of

# Sizes around those at which vectors, tiles and blocks of kernels end.
_LADDER = (1, 2, 3, 5, 9, 17, 33, 65, 97, 129, 193, 257, 385, 513, 1025, 2049, 4097, 16385, 65537)
# Of bfloat16, relative to the largest value: 8 bits of mantissa, and sums of rounded products.
_TOLERANCES = {"f32": 1.0, "bf16": 600.0}

Signature = tuple[str, ...]


@dataclass(frozen=True)
class Boundary:
    """Two sizes, one after the other, with different kernels.

    Attributes:
        form: Name in `FORMS`.
        precision: The hint.
        size: The first size with the kernels ``above``.
        below: Kernels of the size before it.
        above: Kernels of it.
    """

    form: str
    precision: str
    size: int
    below: Signature
    above: Signature

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A size at which OpenVINO's answer is not eager's.

    Attributes:
        error: Largest difference, relative to eager's largest value; NaN if only one has NaN.
    """

    form: str
    precision: str
    size: int
    error: float


def boundaries(name: str, form: Form, precision: str) -> list[Boundary]:
    """Returns where a form's kernels change, among all sizes up to its largest."""
    known: dict[int, Signature] = {}

    def kernels(size: int) -> Signature:
        if size not in known:
            known[size] = _kernels(form, size, precision)
        return known[size]

    sizes = [size for size in _LADDER if size <= form.largest]
    edges: list[Boundary] = []
    for low, high in itertools.pairwise(sizes):
        if kernels(low) != kernels(high):
            size = _first_other(kernels, low, high)
            edges.append(Boundary(name, precision, size, kernels(size - 1), kernels(size)))
    return edges


def _first_other(kernels: Callable[[int], Signature], low: int, high: int) -> int:
    """Bisects to a size whose kernels differ from those of the size before it."""
    while high - low > 1:
        middle = (low + high) // 2
        if kernels(middle) == kernels(low):
            low = middle
        else:
            high = middle
    return high


def differences(name: str, form: Form, precision: str, edges: list[Boundary]) -> list[Difference]:
    """Compares a form with eager on both sides of its boundaries, and of the ends of blocks, with two calls each."""
    # Blocks within a kernel have no name in the runtime model.
    blocks = (1, 24, 25, 32, 33, 48, 64, 65, 96, 128, 192, 256)
    sizes = {size for edge in edges for size in (edge.size - 1, edge.size)} | {*blocks, *form.also, form.largest}
    wrong = []
    for size in sorted(size for size in sizes if 0 < size <= form.largest):
        error = _error(form, size, precision)
        if not error <= form.tolerance * _TOLERANCES[precision]:
            wrong.append(Difference(name, precision, size, error))
    return wrong


def _options(precision: str) -> dict[str, object]:
    return {"min_partition_us": 0, "config": {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}}


def _kernels(form: Form, size: int, precision: str) -> Signature:
    """Compiles a form and returns its kernels, in their order."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = form.build(size)
    parts: list[Observation] = []
    spec = CompileSpec(options=_options(precision), instrumentation=Instrumentation(observe=parts.append))
    with torch.no_grad():
        compile_with(model, spec)(*inputs())
    calls = [call.compiled.compiled for part in parts for call in part.calls.values() if call.compiled is not None]
    return tuple(f"{kernel.kind} {kernel.primitive}" for compiled in calls for kernel in kernels_of(compiled))


def _error(form: Form, size: int, precision: str) -> float:
    torch._dynamo.reset()
    torch.manual_seed(size)
    model, inputs = form.build(size)
    compiled = tov.compile(model, options=_options(precision))
    largest = 0.0
    with torch.no_grad():
        for _ in range(2):
            args = inputs()
            ours, eager = compiled(*args), model(*args)
            if ours.shape != eager.shape or not torch.equal(ours.isnan(), eager.isnan()):
                return float("nan")
            error = (ours - eager).abs().nan_to_num(0.0).max() / eager.abs().nan_to_num(0.0).max().clamp(min=1e-6)
            largest = max(largest, float(error))
    return largest
