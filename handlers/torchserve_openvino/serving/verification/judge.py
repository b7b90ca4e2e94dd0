"""Judges answers by eager PyTorch's: by their numbers, and by what a task's users read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchserve_openvino.backend.runtime.compare import relative_tolerance, too_far, widened
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.serving.verification.measures import Measure, Measurement

WORST = {"max_abs": max, "max_rel": max, "cosine": min, "top1_agreement": min}


@dataclass(frozen=True)
class Verdict:
    """What is said of one answer.

    Attributes:
        problems: What is wrong, as texts to append to the answer's name.
        outputs: Figures of each output, by the names in `WORST`.
        measured: The measure's worst figure; None where nothing was measured.
    """

    problems: list[str]
    outputs: list[dict[str, float | None]] = field(default_factory=list)
    measured: float | None = None


@dataclass(frozen=True)
class Judge:
    """Judges answers of one model in one precision.

    Where an output meets its measure, the precision's numeric tolerance does not count for it: logits near zero differ
    by much of their largest value although no probability moves. Limits that the user sets always count.

    Attributes:
        precision: That of the device; decides the tolerance where ``section.max_abs`` is None.
        section: Tolerances.
        measure: What the task's users read; None if numbers are all that is known of the outputs.
        must_meet: Whether an answer that misses the measure is wrong even if its numbers are near: a precision that was
            chosen must not change answers, while one that the user states is the user's decision.
    """

    precision: str
    section: VerifySection
    measure: Measure | None = None
    must_meet: bool = False

    @property
    def tolerance(self) -> str:
        """The numeric tolerance, for people."""
        if self.section.max_abs is not None:
            return f"max_abs {self.section.max_abs:g}"
        numbers = f"{relative_tolerance(self.precision):g} of the largest value ({self.precision})"
        if self.measure is None or not self.measure.leading:
            return numbers
        return f"{self.measure.name} {self.measure.bound:g}, else {numbers}"

    def judge(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Verdict:
        """Compares an answer with eager PyTorch's.

        Args:
            got: The answer's tensors.
            expected: Those of eager's answer.
        """
        if len(got) != len(expected):
            return Verdict([f": {len(got)} outputs instead of {len(expected)}"])
        judged = self.measure.judge(got, expected) if self.measure is not None else Measurement()
        met = judged.outputs if not judged.problems and self.section.max_abs is None else frozenset()
        problems = list(judged.problems) if self.must_meet else []
        outputs: list[dict[str, float | None]] = []
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                outputs.append({})
                wrong = [f"is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}"]
            else:
                outputs.append(_figures(widened(a), widened(b)))
                wrong = self._wrong(a, b, outputs[-1], index in met)
            problems += [f", output {index}: {text}" for text in wrong]
        return Verdict(problems, outputs, judged.worst)

    def _wrong(self, a: torch.Tensor, b: torch.Tensor, figures: Mapping[str, Any], met: bool) -> list[str]:
        """Returns what is wrong with one output; ``met`` if it meets the measure."""
        problems = []
        if not torch.equal(a.isnan(), b.isnan()):
            problems.append("has NaN at different positions")
        if not met and (far := too_far(a, b, self.precision, self.section.max_abs, figures["max_abs"])):
            problems.append(far)
        least, top1 = self.section.min_cosine, figures["top1_agreement"]
        if least is not None and figures["cosine"] < least:
            problems.append(f"has cosine {figures['cosine']:.6f}, less than min_cosine {least:g}")
        least = self.section.min_top1
        if least is not None and top1 is not None and top1 < least:
            problems.append(f"agrees in {top1:.1%} of the largest values, less than min_top1 {least:.1%}")
        return problems


def worst_of(name: str, values: Sequence[float | None]) -> float | None:
    """Returns the worst of some values of a figure; None if there is none."""
    known = [value for value in values if value is not None]
    return WORST[name](known) if known else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(_flat(tensor), 0.0, 0.0, 0.0)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


def _figures(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    difference = (a - b).abs()
    # The largest difference is NaN or infinite if any is; a large answer is then not searched for them again.
    finite = bool(difference.numel()) and math.isfinite(float(difference.max()))
    if not finite:
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, difference)
    relative = difference / b.abs().clamp_min(1e-6)
    x, y = (_flat(a), _flat(b)) if finite else (_finite(a), _finite(b))
    norm = float(x.norm() * y.norm())
    top1 = None
    if a.dim() >= 2 and a.shape[-1] > 1 and a.numel() and not a.is_complex():
        top1 = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return {
        "max_abs": _largest(difference) if finite or bool(difference.isfinite().all()) else float("inf"),
        "max_rel": _largest(relative) if finite else _largest(_finite(relative)),
        "cosine": float(x @ y) / norm if norm else 1.0,
        "top1_agreement": top1,
    }
