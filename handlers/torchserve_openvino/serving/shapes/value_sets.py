"""The values to verify a compiled shape on: not those that it was compiled with, and some that break kernels.

Random values alone miss much: a kernel that is wrong at zero, an index at the end of its table, a mask that is treated
as all ones because the first call's was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchserve_openvino.backend.runtime.compare import output_tensors, reordered
from torchserve_openvino.serving.shapes.input_spec import Inputs, InputSpec, Signature
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs


@dataclass(frozen=True)
class ValueSet:
    """One set of values for a compiled shape.

    Attributes:
        name: What messages and the report call it.
        constant: Whether an input has one value everywhere, so that a normalization divides rounding errors by almost
            nothing.
        needs_finite: Whether the set is skipped where eager's own answer contains NaN.
    """

    name: str
    inputs: Inputs
    constant: bool = False
    needs_finite: bool = False


def value_sets(declared: DeclaredInputs, signature: Signature, *, rich: bool) -> list[ValueSet]:
    """Returns the sets for one compiled shape; warm-up's values (`DeclaredInputs.make` with seed 0) are not among them.

    Args:
        declared: What the model takes.
        signature: The shape.
        rich: Whether to add masks padded on the left, an empty row, zeros, and the ends of the declared ranges.
    """
    masked = any(spec.mask for spec in declared.specs)
    sets = [ValueSet("random", declared.make(signature, seed=1))]
    plain = ValueSet("random again", declared.make(signature, seed=2))
    if masked:
        sets.append(ValueSet("padded right", _masked(declared, signature, 3, "right")))
    if not masked or rich:
        sets.append(plain)
    if not rich:
        return sets
    if masked:
        sets.append(ValueSet("padded left", _masked(declared, signature, 4, "left")))
        sets.append(ValueSet("an empty row", _masked(declared, signature, 5, "empty"), needs_finite=True))
    known = [declared.make(signature), *(values.inputs for values in sets)]
    for name in ("zeros", "least", "greatest"):
        inputs = _constant(declared, signature, name)
        # Zero is often the least value too.
        if inputs is not None and not any(_equal(inputs, other) for other in known):
            known.append(inputs)
            sets.append(ValueSet(name, inputs, constant=True))
    return sets


def sample_sets(inputs: Inputs) -> list[ValueSet]:
    """Returns the sets for a sample from the archive: its own values in another order, where that changes anything."""
    other = reordered(inputs)
    return [] if other is None else [ValueSet("reversed", other)]


def richest(signatures: Sequence[Signature]) -> set[str]:
    """Returns the names of the smallest and the largest shape, which get all sets."""

    def volume(signature: Signature) -> int:
        size = signature.batch
        for length in signature.dims.values():
            size *= length
        return size

    return {str(pick(signatures, key=volume)) for pick in (min, max)} if signatures else set()


def _masked(declared: DeclaredInputs, signature: Signature, seed: int, padding: str) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        _mask(spec, signature, padding) if spec.mask else spec.make(signature, generator) for spec in declared.specs
    ]
    return declared.call(tensors)


def _mask(spec: InputSpec, signature: Signature, padding: str) -> torch.Tensor:
    """Returns a mask with ones where the input is not padding; each row of the batch has another length."""
    rows, *_, length = shape = spec.sizes(signature)
    if padding == "empty":
        mask = torch.ones(shape)
        mask[-1] = 0
        return mask.to(spec.dtype)
    real = torch.tensor([max(1, length * (row + 1) // (rows + 1)) for row in range(rows)])
    mask = torch.arange(length) < real[:, None]
    if padding == "left":
        mask = mask.flip(1)
    return mask.view(rows, *[1] * (len(shape) - 2), length).expand(shape).contiguous().to(spec.dtype)


def _constant(declared: DeclaredInputs, signature: Signature, name: str) -> Inputs | None:
    """Fills each input that has the named value with it, others randomly; returns None where no input has it."""
    values = [None if spec.mask else _value(spec, name) for spec in declared.specs]
    if all(value is None for value in values):
        return None
    generator = torch.Generator().manual_seed(6)
    tensors = [spec.make(signature, generator) for spec in declared.specs]
    return declared.call(
        [t if value is None else torch.full_like(t, value) for t, value in zip(tensors, values, strict=True)]
    )


def _value(spec: InputSpec, name: str) -> float | bool | None:
    """Returns zero, or an end of the declared range as `InputSpec.make` understands it; None where there is none."""
    if spec.dtype is torch.bool:
        return name == "greatest"
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        if spec.low is None and spec.high is None:
            return 0.0 if name == "zeros" else None
        low = spec.low if spec.low is not None else 0.0
        high = spec.high if spec.high is not None else low + 1.0
    else:
        low = int(spec.low or 0)
        high = (int(spec.high) if spec.high is not None else low + 2) - 1
    if name == "zeros":
        return 0 if low <= 0 <= high else None
    return low if name == "least" else high


def _equal(a: Inputs, b: Inputs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(output_tensors(a), output_tensors(b), strict=True))
