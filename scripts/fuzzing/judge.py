"""Compares two observations within floating-point precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fuzzing.observe import Observation
from torchserve_openvino.backend.runtime.compare import RELATIVE_TOLERANCE, largest_allowed, widened

# If disturbance alone moves a tensor by more than this share of its largest value, its values are not compared.
_ILL_CONDITIONED = 0.2
# Disturbances are random; real rounding errors are correlated and of other sizes.
NOISE_FACTOR = 16.0
# What is not compared must still be no larger than this multiple of eager's largest value.
_SANE = 32.0
# Marks a description in which ours has NaN and eager has a number.
MADE_NAN = "NaN that eager does not have"
# Any other difference takes precedence over these.
SOFT = frozenset({"stride", "alias"})
KINDS = (
    "crash",
    "no_error",
    "structure",
    "shape",
    "dtype",
    "value",
    "effect",
    "overwritten",
    "grad",
    "stride",
    "alias",
    "uncounted",
)


def difference(
    ours: Observation,
    eager: Observation,
    noise: Mapping[str, float],
    strict: bool = False,
    layouts: bool = True,
    relative: float = RELATIVE_TOLERANCE["f32"],
) -> tuple[str, str]:
    """Kind and description of the first difference; two empty strings if there is none.

    Args:
        ours: Observation of the compiled model.
        eager: Observation of the eager model.
        noise: For each tensor, the difference that disturbed eager runs show.
        strict: Whether to compare strides also where memory has gaps, as in a slice.
        layouts: Whether to compare strides of computed outputs; torch.export promises none.
        relative: The share of a tensor's largest value by which it may differ, beside the noise.
    """
    if eager.error:
        return ("", "") if ours.error else ("no_error", f"eager raises {eager.error}, ours answers")
    if ours.error:
        return "crash", ours.error
    if ours.structure != eager.structure:
        return "structure", f"{ours.structure} instead of {eager.structure}"
    for name, theirs in eager.tensors.items():
        if name not in ours.tensors:
            return _kind_of(name), f"{name} is missing"
        mine = ours.tensors[name]
        if mine.dtype != theirs.dtype:
            return "dtype", f"{name} is {mine.dtype} instead of {theirs.dtype}"
        if mine.shape != theirs.shape:
            return "shape", f"{name} is {list(mine.shape)} instead of {list(theirs.shape)}"
        if problem := _values(mine, theirs, noise.get(name, 0.0), relative):
            return _kind_of(name), f"{name}: {problem}"
    if set(ours.tensors) - set(eager.tensors):
        return "grad", f"{sorted(set(ours.tensors) - set(eager.tensors))} have gradients, in eager they do not"
    for name, stride in eager.strides.items():
        promised = strict or (layouts and _dense(eager.tensors[name].shape, stride)) or _of_input(eager, name)
        if promised and not _same_layout(eager.tensors[name].shape, ours.strides[name], stride):
            return "stride", f"{name} {list(eager.tensors[name].shape)}: {ours.strides[name]} instead of {stride}"
    for pair in (*eager.aliases, *(p for p in ours.aliases if p not in eager.aliases)):
        mine_is, theirs_is = ours.aliases.get(pair, "nothing"), eager.aliases.get(pair, "nothing")
        if mine_is != theirs_is:
            return "alias", f"{pair[0]} and {pair[1]}: {mine_is} instead of {theirs_is}"
    for name, expected in eager.requires_grad.items():
        if ours.requires_grad[name] != expected:
            return "grad", f"{name}.requires_grad is {ours.requires_grad[name]} instead of {expected}"
    return "", ""


def noise_of(clean: Observation, disturbed: Sequence[Observation], factor: float = NOISE_FACTOR) -> dict[str, float]:
    """How far disturbance moves each tensor, times a factor; infinite if a comparison is pointless."""
    noise: dict[str, float] = {}
    for name, tensor in clean.tensors.items():
        worst = 0.0
        for other in disturbed:
            moved = other.tensors.get(name)
            if moved is None or moved.shape != tensor.shape or moved.dtype != tensor.dtype:
                worst = float("inf")
                break
            if tensor.is_floating_point():
                worst = max(worst, _largest(moved, tensor))
            elif not torch.equal(moved, tensor):
                worst = float("inf")
        scale = _scale(tensor)
        noise[name] = float("inf") if worst > _ILL_CONDITIONED * scale else worst * factor
    return noise


def errors_of(clean: Observation, exact: Observation) -> dict[str, float]:
    """How far each tensor is from its value in float64; only of those that have one."""
    pairs = ((name, tensor, exact.tensors.get(name)) for name, tensor in clean.tensors.items())
    return {
        name: _largest(tensor, wide)
        for name, tensor, wide in pairs
        if wide is not None and wide.shape == tensor.shape and tensor.is_floating_point()
    }


def _kind_of(name: str) -> str:
    return {"output": "value", "grad": "grad", "earlier": "overwritten"}.get(name.split(maxsplit=1)[0], "effect")


def _values(mine: torch.Tensor, theirs: torch.Tensor, noise: float, relative: float) -> str:
    if not theirs.numel() or torch.equal(mine, theirs):
        return ""
    if noise == float("inf"):
        return "" if relative == RELATIVE_TOLERANCE["f32"] else _insane(mine, theirs, relative)
    if not theirs.is_floating_point():
        if torch.equal(mine, theirs):
            return ""
        return f"{_short(mine)} instead of {_short(theirs)}"
    wrong = mine.isnan() != theirs.isnan()
    infinite = theirs.isinf()
    wrong |= (mine != theirs) & (infinite | mine.isinf()) & ~theirs.isnan()
    limit = _allowed(theirs, relative) + noise
    apart = (widened(mine) - widened(theirs)).abs()
    wrong |= (apart > limit) & ~infinite
    if not bool(wrong.any()):
        return ""
    note = f", {MADE_NAN}" if bool((mine.isnan() & ~theirs.isnan()).any()) else ""
    counted = f"{int(wrong.sum())} of {wrong.numel()} differ, limit {limit:.2g}{note}"
    return f"{_short(mine)} instead of {_short(theirs)} ({counted})"


def _allowed(expected: torch.Tensor, relative: float) -> float:
    """The largest difference that needs no closer look."""
    if relative >= RELATIVE_TOLERANCE["f32"]:
        return largest_allowed(expected, "f32") * relative / RELATIVE_TOLERANCE["f32"]
    # OpenVINO's kernels may give 0 for subnormal numbers, as its exponential does (docs/limits.md).
    return max(relative, torch.finfo(expected.dtype).eps) * _magnitude(expected) + torch.finfo(torch.float32).tiny


def _insane(mine: torch.Tensor, theirs: torch.Tensor, relative: float) -> str:
    """What is wrong in any precision: numbers that are not finite or too large."""
    if not theirs.is_floating_point() or not bool(theirs.isfinite().all()):
        return ""
    if not bool(mine.isfinite().all()):
        kind_ = MADE_NAN if bool(mine.isnan().any()) else "infinity that eager does not have"
        return f"{_short(mine)} instead of {_short(theirs)} ({kind_})"
    # What is 0 but for rounding, as the gradient of a bias in front of a softmax, is as large as rounding: of values
    # around 1 that are added up.
    limit = _SANE * max(1e-3, relative, _magnitude(theirs))
    return f"up to {_magnitude(mine):.3g}, in eager up to {_magnitude(theirs):.3g}" if _magnitude(mine) > limit else ""


def _magnitude(tensor: torch.Tensor) -> float:
    return float(widened(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (widened(a) - widened(b)).abs())
    return float(apart.nan_to_num(float("inf"), float("inf")).max())


def _scale(tensor: torch.Tensor) -> float:
    if not tensor.numel() or not tensor.is_floating_point():
        return 1.0
    return max(1e-3, float(widened(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max()))


def _same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)


def _dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps, in any order of dimensions, which torch.compile keeps."""
    expected = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _of_input(seen: Observation, name: str) -> bool:
    return any(pair[0] == name and pair[1].startswith("input") for pair in seen.aliases)


def _short(tensor: torch.Tensor) -> str:
    flat = tensor.reshape(-1)
    shown = [round(v, 5) if isinstance(v, float) else v for v in flat[:6].tolist()]
    return f"{shown}{'...' if flat.numel() > 6 else ''}"
