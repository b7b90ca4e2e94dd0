"""Compares two outputs of a model, within the tolerance of a precision."""

import dataclasses
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.spec import is_plain
from torchserve_openvino.errors import VerificationError
from torchserve_openvino.report.tracker import Tracker

# Largest difference, relative to the largest value of the output. For float32 it covers the summation order over some
# thousand terms; bfloat16 has 8 bits of mantissa, float16 11, and their rounding adds up over the layers of a network.
# Of activations in int8, a value halfway between two integers may become either, and each further layer makes more of
# the difference: raw OpenVINO is up to 0.3 off in a transformer with random tokens. This finds what is wrong, not what
# is inaccurate.
RELATIVE_TOLERANCE = {"f32": 1e-3, "bf16x3": 1e-3, "f16": 2e-2, "bf16": 6e-2, "int8": 0.5}
# Outputs below it are assumed to be what remains after larger values cancel: the tolerance shrinks no further.
SMALLEST_SCALE = 1e-2
# The share of an output's integers or booleans that may differ. Rounding rarely changes an argmax or a thresholded
# value, but then by any amount; in f32, in an output of fewer than 1,000 values none may differ.
MOVED_SHARE = {"f32": 1e-3, "bf16x3": 1e-3, "f16": 5e-3, "bf16": 2e-2, "int8": 0.1}
# Samples of pictures and sound, which a lower precision moves by a little, and nearly all of them.
_QUANTITIES = frozenset({torch.uint8, torch.int8, torch.int16})
_F32 = frozenset({"f32", "bf16x3"})
_OF_DTYPE = {torch.float16: RELATIVE_TOLERANCE["f16"], torch.bfloat16: RELATIVE_TOLERANCE["bf16"]}


def relative_tolerance(precision: str) -> float:
    """Returns the relative tolerance for an inference precision; the widest one for an unknown name."""
    return RELATIVE_TOLERANCE.get(precision, RELATIVE_TOLERANCE["bf16"])


def largest_allowed(expected: torch.Tensor, precision: str) -> float:
    """Returns the largest absolute difference allowed from one output of eager PyTorch, if the user sets none.

    Args:
        expected: The output, of any dtype.
        precision: The precision that the device infers with.
    """
    # A model may compute in a narrower type than the device is set to.
    relative = max(relative_tolerance(precision), _OF_DTYPE.get(expected.dtype, 0.0))
    finite = widened(expected).abs().nan_to_num(0.0, 0.0, 0.0)
    return relative * max(SMALLEST_SCALE, float(finite.max()) if finite.numel() else 0.0)


def is_finite(tensor: torch.Tensor) -> bool:
    """Checks that no value of a tensor of floats is NaN or infinite.

    The least and the largest value show it in one pass; `torch.isfinite` makes several and takes ten times as long.
    """
    if not tensor.numel():
        return True
    least, largest = tensor.aminmax()
    return math.isfinite(float(least)) and math.isfinite(float(largest))


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output of any structure, in order."""
    # A ModelOutput of transformers may be unknown to torch's pytree, but it is a mapping.
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def comparable(output: Any) -> list[torch.Tensor]:
    """Returns everything in an output that can be compared, as tensors, in order.

    Numbers and NumPy's arrays become tensors, texts and what else NumPy holds a number that stands for them; fields of
    dataclasses count by themselves. None and other objects are left out.
    """
    return list(_comparable(output))


def _comparable(output: Any) -> Iterator[torch.Tensor]:
    plain = dict(output) if hasattr(output, "keys") else output
    for leaf in pytree.tree_leaves(plain):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (np.ndarray, np.generic)):
            array = np.asarray(leaf)
            yield torch.tensor(array) if array.dtype.kind in "biufc" else _standing_for(repr(array.tolist()))
        elif isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63:
            yield _standing_for(str(leaf))
        elif isinstance(leaf, (bool, int, float, complex)):
            yield torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        elif isinstance(leaf, (str, bytes)):
            yield _standing_for(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not hasattr(leaf, "keys"):
            yield from _comparable([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif leaf is not output and hasattr(leaf, "keys"):
            yield from _comparable(leaf)


def _standing_for(text: str | bytes) -> torch.Tensor:
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return torch.tensor(int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True))


def difference(got: Any, expected: Any, precision: str, max_abs: float | None = None) -> str:
    """Describes in words how an output differs from the expected one; empty if it does not.

    Args:
        got: The output.
        expected: Eager PyTorch's output.
        precision: The precision that the device infers with; sets the tolerance.
        max_abs: Largest difference allowed, instead of the precision's.
    """
    ours, theirs = comparable(got), comparable(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs instead of {len(theirs)}"
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index} is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}"
        if flaw := too_far(a, b, precision, max_abs):
            return f"output {index} {flaw}"
    return ""


def too_far(
    got: torch.Tensor,
    expected: torch.Tensor,
    precision: str,
    max_abs: float | None = None,
    worst: float | None = None,
) -> str:
    """Describes how the values of one output are wrong, as a sentence without its subject; empty if they are right.

    Args:
        got: The output.
        expected: Eager PyTorch's output, of the same shape and dtype.
        precision: The precision that the device infers with; sets the tolerance.
        max_abs: Largest difference allowed, instead of the precision's.
        worst: The largest difference, if the caller knows it already.
    """
    if not expected.numel():
        return ""
    integers = not expected.is_floating_point() and not expected.is_complex()
    if integers and torch.equal(got, expected):
        return ""
    if integers and max_abs is None and (precision in _F32 or expected.dtype not in _QUANTITIES):
        share = MOVED_SHARE.get(precision, MOVED_SHARE["bf16"])
        moved, allowed = int((got != expected).sum()), int(share * expected.numel())
        kind = str(expected.dtype).removeprefix("torch.")
        return f"differs in {moved} of {expected.numel()} {kind} values, more than {allowed}" if moved > allowed else ""
    limit = largest_allowed(expected, precision) if max_abs is None else max_abs
    worst = _worst(widened(got), widened(expected)) if worst is None else worst
    # Large integers that differ may be one number in float64.
    worst = max(worst, 1.0) if integers else worst
    return f"differs by {worst:.3g}, more than {limit:.3g}" if worst > limit else ""


def largest_difference(got: Any, expected: Any) -> float:
    """Returns the largest absolute difference between two outputs; infinite if only one is NaN, or shapes differ."""
    ours, theirs = comparable(got), comparable(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = [(widened(a), widened(b)) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max((_worst(x, y) for x, y in pairs), default=0.0)


def reordered(call: Any) -> Any | None:
    """Reverses the values of each tensor of a call: other values of the same shapes, types, layouts and range.

    Returns:
        The new call; None if nothing changes, or if a tensor is not plain strided.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    if not all(map(is_plain, tensors)):
        return None
    other = _changed(call, lambda tensor: tensor.flip(tuple(range(tensor.dim()))))
    others = [leaf for leaf in pytree.tree_leaves(other) if isinstance(leaf, torch.Tensor)]
    return other if any(not torch.equal(a, b) for a, b in zip(others, tensors, strict=True)) else None


def copied(value: Any) -> Any:
    """Returns a structure with copies of its tensors, which the same graph takes: strides and identities stay."""
    return _changed(value, lambda tensor: tensor)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a structure with changed tensors.

    Dynamo's guards hold for the result, too: expanded tensors are expanded, and a tensor in two places is one.
    """
    changed: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = _in_layout_of(tensor, change(tensor.detach())).requires_grad_(tensor.requires_grad)
        return changed[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, one, value)


def _in_layout_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the values with a tensor's strides; where elements share memory otherwise, contiguous."""
    if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
        return values.clone()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and values.numel():
            values = values.narrow(dim, 0, 1)
    copy = torch.empty_strided(values.size(), tensor.stride(), dtype=values.dtype, device=values.device)
    try:
        return copy.copy_(values).expand(tensor.size())
    except RuntimeError:
        # Windows that overlap can't be written to.
        return values.clone()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to float64 or complex128, in which any two values can be subtracted."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _worst(x: torch.Tensor, y: torch.Tensor) -> float:
    same = (x == y) | (x.isnan() & y.isnan())
    return float(torch.where(same, 0.0, (x - y).abs()).nan_to_num(float("inf"), float("inf")).max())


# --- compares results of new graphs with eager PyTorch's, for the option ``verify: first``, and records the outcome


class FirstComparison:
    """Compares results, and keeps the figures of the report's entry ``verify``.

    Args:
        tracker: Holds the precision, and gets the figures.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._lock = threading.Lock()
        self._compared = self._mismatches = 0
        self._worst = 0.0

    def count(self) -> None:
        """Counts a graph that was compared by other means, and matched."""
        with self._lock:
            self._compared += 1
            self.tracker.verify.state_first(self._compared, self._mismatches, self._worst)

    def compare(self, result: Any, expected: Any, where: str = "") -> None:
        """Compares a result with eager PyTorch's.

        Args:
            result: The result.
            expected: Eager PyTorch's result for the same inputs.
            where: What was compared, if not a call of the model.

        Raises:
            VerificationError: They differ by more than the tolerance of the precision.
        """
        precision = str(self.tracker.config.get("effective_precision", ""))
        with torch.no_grad():
            problem, worst = difference(result, expected, precision), largest_difference(result, expected)
        with self._lock:
            self._compared += 1
            self._mismatches += bool(problem)
            self._worst = max(self._worst, worst)
            self.tracker.verify.state_first(self._compared, self._mismatches, self._worst)
        if problem:
            raise VerificationError(
                f"verify: first found that a result differs from eager PyTorch's{where and ' in '}{where}: {problem} "
                f"allowed in {precision or 'this precision'} (largest difference of all outputs: {worst:.3g}). The "
                "result is not returned, and the next call is compared again. `torchserve-openvino doctor --bisect` "
                "finds the operators; `disabled_ops` leaves them in eager PyTorch. If the difference is acceptable, "
                "compile without `verify`."
            )
