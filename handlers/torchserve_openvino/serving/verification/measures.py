"""What a task's answer may lose in a narrower precision: a bound on what its users read, not on raw numbers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from torchserve_openvino.backend.runtime.compare import widened
from torchserve_openvino.config.sections.openvino_section import MeasureSection
from torchserve_openvino.errors import ConfigError

KEY = "handler.openvino.verify.measure"


@dataclass(frozen=True)
class Measurement:
    """What a measure says of an answer.

    Attributes:
        worst: The worst figure; None where there is none.
        problems: What is wrong, as texts to append to the answer's name.
        outputs: Which outputs it decides about, so that their numbers need not be near.
    """

    worst: float | None = None
    problems: tuple[str, ...] = ()
    outputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Measure(ABC):
    """Compares the outputs of a model with eager PyTorch's.

    Attributes:
        bound: What the figure may be at worst.
        name: The figure's name, in `verify.measure` and in the report.
        leading: How many of the first outputs are all that users read of; 0 where the figure is a mean, which hides
            single values that are wrong.
    """

    bound: float
    leading: int = field(default=1, kw_only=True)
    name: ClassVar[str]

    @abstractmethod
    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """Returns the worst figure of an output, None where it has none, and what is wrong with it.

        Args:
            got: The output.
            expected: Eager PyTorch's, of the same shape and dtype.

        Returns:
            The figure, and a sentence without its subject; empty if nothing is wrong.
        """

    def judge(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Measurement:
        """Judges an answer; by default, each output of floats by itself.

        Args:
            got: The outputs.
            expected: Eager PyTorch's. Outputs of another shape or dtype are not judged here.
        """
        worst, problems, outputs = None, [], []
        for index, (a, b) in enumerate(zip(got, expected, strict=False)):
            if a.shape == b.shape and a.is_floating_point() and b.is_floating_point():
                figure, text = self.judge_output(a, b)
                worst = self.worse(worst, figure)
                problems += [f", output {index}: {text}"] if text else []
                outputs += [index] if figure is not None and index < self.leading else []
        return Measurement(worst, tuple(problems), frozenset(outputs))

    @classmethod
    def worse(cls, first: float | None, second: float | None) -> float | None:
        """Returns the worse of two figures; NaN is the worst."""
        return max((measure for measure in (first, second) if measure is not None), key=cls._badness, default=None)

    @staticmethod
    def _badness(figure: float) -> float:
        return float("inf") if math.isnan(figure) else figure

    def described(self, worst: float | None = None) -> dict[str, Any]:
        """Returns the measure for the report, JSON-safe.

        Args:
            worst: The worst figure of all answers; None before there is one.
        """
        return {"name": self.name, "bound": self.bound, **({"worst": worst} if worst is not None else {})}


@dataclass(frozen=True)
class Top1(Measure):
    """Probabilities along one axis differ by no more than the bound; the first class is eager's where its lead is more.

    Attributes:
        axis: Where the classes are.
    """

    bound: float = 0.02
    axis: int = -1
    name = "probability"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """See `Measure.judge_output`."""
        a, b = self._probabilities(got), self._probabilities(expected)
        if not b.numel() or b.shape[self.axis] < 2:
            # Probabilities of one class are all 1; the numeric tolerance decides alone.
            return None, ""
        if not torch.equal(a.isnan(), b.isnan()):
            return math.nan, "has NaN at different positions"
        a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
        worst = float((a - b).abs().max())
        if worst > self.bound:
            return worst, f"has a probability that differs by {worst:.3g}, more than {KEY}.{self.name} {self.bound:g}"
        first, second = b.topk(2, dim=self.axis).values.unbind(self.axis)
        moved = (a.argmax(self.axis) != b.argmax(self.axis)) & (first - second > self.bound)
        if moved.any():
            clear = f"{int(moved.sum())} of {moved.numel()} rows where eager's is clear"
            return worst, f"has another first class in {clear}"
        return worst, ""

    def _probabilities(self, output: torch.Tensor) -> torch.Tensor:
        wide = widened(output)
        sums = wide.sum(self.axis)
        # A model may end with its softmax, which must not be applied twice.
        if wide.numel() and bool((wide >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all()):
            return wide
        return wide.softmax(self.axis)


@dataclass(frozen=True)
class Cosine(Measure):
    """Each row points where eager's does."""

    bound: float = 0.999
    name = "cosine"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """See `Measure.judge_output`."""
        a, b = widened(got), widened(expected)
        if not b.numel():
            return None, ""
        # Two vectors of zeros are equal, but have no direction.
        same = (a == b).all(-1)
        cosine = torch.where(same, 1.0, torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-30))
        worst = float(cosine.min())
        if not worst >= self.bound:
            return worst, f"has a row of cosine {worst:.6f}, less than {KEY}.{self.name} {self.bound:g}"
        return worst, ""

    @staticmethod
    def _badness(figure: float) -> float:
        return float("inf") if math.isnan(figure) else -figure


@dataclass(frozen=True)
class Relative(Measure):
    """Differences are small in the mean, relative to eager's mean."""

    bound: float = 0.01
    leading: int = field(default=0, kw_only=True)
    name = "relative"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """See `Measure.judge_output`."""
        a, b = widened(got), widened(expected)
        if not b.numel() or torch.equal(a, b):
            return (0.0 if b.numel() else None), ""
        scale = float(b.abs().mean())
        error = float((a - b).abs().mean()) / scale if scale else float("inf")
        if not error <= self.bound:
            return error, f"differs by {error:.3g} of its mean, more than {KEY}.{self.name} {self.bound:g}"
        return error, ""


@dataclass(frozen=True)
class Independent(Measure):
    """Scores between 0 and 1, a sigmoid of each output, differ by no more than the bound; clear orders are eager's.

    The rows of a batch are the texts of a ranking. Two that eager's outputs separate by more than four times the bound
    keep their order: where the sigmoid is steepest, that is a difference of the scores by the bound.
    """

    bound: float = 0.02
    name = "probability"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """See `Measure.judge_output`."""
        a, b = widened(got), widened(expected)
        if not b.numel():
            return None, ""
        worst = float((a.sigmoid() - b.sigmoid()).abs().max())
        if not worst <= self.bound:
            return worst, f"has a score that differs by {worst:.3g}, more than {KEY}.{self.name} {self.bound:g}"
        a, b = (tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1) for tensor in (a, b))
        before, after = b[:, None] - b[None], a[:, None] - a[None]
        moved = (before > 4 * self.bound) & (after <= 0)
        if moved.any():
            return worst, f"orders {int(moved.sum())} pair(s) of rows in another way where eager's order is clear"
        return worst, ""


@dataclass(frozen=True, eq=False)
class Similarities(Measure):
    """Rows are compared by what users read: how well each fits some reference vectors, as probabilities.

    Attributes:
        references: Vectors of length 1, ``[references, width]``.
        scale: Factor of the products.
        bias: Added to them.
        independent: Whether each probability is a sigmoid; else they are a softmax.
    """

    bound: float = 0.02
    references: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    scale: float = 1.0
    bias: float = 0.0
    independent: bool = False
    name = "probability"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """See `Measure.judge_output`."""
        if not expected.numel() or not len(self.references):
            return None, ""
        a, b = (widened(tensor) @ widened(self.references).mT * self.scale + self.bias for tensor in (got, expected))
        return (Independent if self.independent else Top1)(self.bound).judge_output(a, b)


@dataclass(frozen=True)
class Detections(Measure):
    """Objects that eager PyTorch detects are detected with the same label, place and score, and no others.

    Attributes:
        least_score: Only objects of at least this score count.
        overlap: Least intersection over union of both boxes.
        has_no_object: Whether the last class is "no object", and scores are a softmax; else they are sigmoids.
    """

    bound: float = 0.02
    least_score: float = 0.1
    overlap: float = 0.9
    has_no_object: bool = False
    leading: int = field(default=2, kw_only=True)
    name = "probability"

    def judge_output(self, got: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, str]:
        """Returns nothing: labels and boxes can only be judged together."""
        return None, ""

    def judge(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Measurement:
        """Judges logits ``[batch, queries, classes]`` with boxes ``[batch, queries, 4]``: center, width, height."""
        same = len(got) == len(expected) >= 2 and all(a.shape == b.shape for a, b in zip(got, expected, strict=True))
        if not same:
            return Measurement()
        worst, problems = None, []
        for row, (a, b) in enumerate(zip(self._objects(*got[:2]), self._objects(*expected[:2]), strict=True)):
            # The detections of one must be among those of the other, whose scores may be lower by the bound.
            (missing, less), (added, more) = self._compared(b, a), self._compared(a, b)
            worst = self.worse(worst, self.worse(less, more))
            if missing or added:
                problems.append(
                    f", image {row}: lacks {missing} of eager's objects, and has {added} others (same label, "
                    f"overlap of at least {self.overlap:g}, {KEY}.{self.name} {self.bound:g})"
                )
        return Measurement(worst, tuple(problems), frozenset(range(self.leading)) if worst is not None else frozenset())

    def _objects(self, logits: torch.Tensor, boxes: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        wide = widened(logits)
        scores = wide.softmax(-1)[..., :-1] if self.has_no_object else wide.sigmoid()
        center, size = widened(boxes).split(2, -1)
        corners = torch.cat([center - size / 2, center + size / 2], -1)
        return [(*score.max(-1), box) for score, box in zip(scores, corners, strict=True)]

    def _compared(self, some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> tuple[int, float | None]:
        """Returns how many of some clear objects have no match among the others, and by how much scores differ most."""
        scores, labels, boxes = some
        clear = scores >= self.least_score
        same = (labels[clear, None] == others[1][None]) & (_overlaps(boxes[clear], others[2]) >= self.overlap)
        # A score differs by 1 at most, so that this is no match; neither is NaN.
        apart = (scores[clear, None] - others[0][None]).abs().where(same, 1.0).nan_to_num(1.0)
        nearest = apart.amin(-1) if apart.numel() else apart.new_ones(len(apart))
        unmatched = int((nearest > self.bound).sum()) + int(scores.isnan().sum() != others[0].isnan().sum())
        return unmatched, float(nearest.max()) if len(nearest) else None


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the intersection over union of each pair of boxes, ``[len(a), len(b)]``."""
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clamp_min(0).prod(-1)
    areas = [(boxes_[:, 2:] - boxes_[:, :2]).clamp_min(0).prod(-1) for boxes_ in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None] - shared).clamp_min(1e-12)


def with_bounds(measure: Measure | None, section: MeasureSection) -> Measure | None:
    """Returns a task's measure with the bound that the YAML sets.

    Raises:
        ConfigError: The YAML sets a bound of a measure that the task does not use.
    """
    for name, bound in section.model_dump(exclude_none=True).items():
        if measure is None:
            raise ConfigError(
                "has no use here: answers of this handler are compared by numbers. Remove it, or set verify.max_abs, "
                "verify.min_cosine or verify.min_top1.",
                key=f"{KEY}.{name}",
            )
        if name != measure.name:
            raise ConfigError(
                f"has no use here: answers of this task are measured by {measure.name}. Set {KEY}.{measure.name}.",
                key=f"{KEY}.{name}",
            )
        measure = replace(measure, bound=bound)
    return measure


# --- times of the calls that verification makes anyway ------------------------------------------------------------


@dataclass(frozen=True)
class CaseTimes:
    """Times of one case.

    Attributes:
        eager: Seconds of the fastest call in eager PyTorch.
        compiled: Seconds of the slowest call of the compiled model.
        fastest: Seconds of its fastest call.
    """

    eager: float
    compiled: float
    fastest: float

    def merged(self, other: "CaseTimes") -> "CaseTimes":
        """Returns the times of both."""
        return CaseTimes(
            min(self.eager, other.eager), max(self.compiled, other.compiled), min(self.fastest, other.fastest)
        )
