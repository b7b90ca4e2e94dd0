"""Compares two outputs of a model, within the tolerance of a precision."""

import math
import threading
from typing import Any

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
# The share of an output's integers or booleans that may differ in f32. Rounding rarely changes an argmax or a
# thresholded value, but then by any amount; in an output of fewer than 1,000 values none may differ.
MOVED_SHARE = 1e-3
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


def difference(got: Any, expected: Any, precision: str, max_abs: float | None = None) -> str:
    """Describes in words how an output differs from the expected one; empty if it does not.

    Args:
        got: The output.
        expected: Eager PyTorch's output.
        precision: The precision that the device infers with; sets the tolerance.
        max_abs: Largest difference allowed, instead of the precision's.
    """
    ours, theirs = output_tensors(got), output_tensors(expected)
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
    if integers and max_abs is None and precision in _F32:
        moved, allowed = int((got != expected).sum()), int(MOVED_SHARE * expected.numel())
        kind = str(expected.dtype).removeprefix("torch.")
        return f"differs in {moved} of {expected.numel()} {kind} values, more than {allowed}" if moved > allowed else ""
    limit = largest_allowed(expected, precision) if max_abs is None else max_abs
    worst = _worst(widened(got), widened(expected)) if worst is None else worst
    return f"differs by {worst:.3g}, more than {limit:.3g}" if worst > limit else ""


def largest_difference(got: Any, expected: Any) -> float:
    """Returns the largest absolute difference between two outputs; infinite if only one is NaN, or shapes differ."""
    ours, theirs = output_tensors(got), output_tensors(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = [(widened(a), widened(b)) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max((_worst(x, y) for x, y in pairs), default=0.0)


def reordered(call: Any) -> Any | None:
    """Reverses the values of each tensor of a call: other values of the same shapes, types and range.

    Returns:
        The new call; None if nothing changes, or if a tensor is not plain strided.
    """
    leaves, spec = pytree.tree_flatten(call)
    changed = False
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if not is_plain(leaf):
            return None
        other = leaf.detach().flip(tuple(range(leaf.dim()))).requires_grad_(leaf.requires_grad)
        changed = changed or not torch.equal(other, leaf)
        leaves[position] = other
    return pytree.tree_unflatten(leaves, spec) if changed else None


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
