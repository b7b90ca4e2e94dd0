"""What a task's answer may lose in a narrower precision: a bound on what its users read, not on raw numbers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torchserve_openvino.backend.runtime.compare import widened
from torchserve_openvino.config.sections.handler import MeasureSection
from torchserve_openvino.errors import ConfigError

KEY = "handler.openvino.verify.measure"


@dataclass(frozen=True)
class Measure(ABC):
    """Compares one output of a model with eager PyTorch's.

    Attributes:
        bound: What the figure may be at worst.
        name: The figure's name, in `verify.measure` and in the report.
    """

    bound: float
    name: ClassVar[str]

    @abstractmethod
    def problem(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        """Returns what is wrong with an output, as a sentence without its subject; empty if nothing is.

        Args:
            got: The output.
            expected: Eager PyTorch's, of the same shape and dtype.
        """

    def described(self) -> dict[str, Any]:
        """Returns the measure for the report, JSON-safe."""
        return {"name": self.name, "bound": self.bound}


@dataclass(frozen=True)
class Top1(Measure):
    """Probabilities along one axis differ by no more than the bound; the first class is eager's where its lead is more.

    Attributes:
        axis: Where the classes are.
    """

    bound: float = 0.02
    axis: int = -1
    name = "probability"

    def problem(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        """See `Measure.problem`."""
        a, b = self._probabilities(got), self._probabilities(expected)
        if not b.numel() or b.shape[self.axis] < 2:
            # Probabilities of one class are all 1; the numeric tolerance decides alone.
            return ""
        if not torch.equal(a.isnan(), b.isnan()):
            return "has NaN at different positions"
        a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
        worst = float((a - b).abs().max())
        if worst > self.bound:
            return f"has a probability that differs by {worst:.3g}, more than {KEY}.{self.name} {self.bound:g}"
        first, second = b.topk(2, dim=self.axis).values.unbind(self.axis)
        moved = (a.argmax(self.axis) != b.argmax(self.axis)) & (first - second > self.bound)
        if moved.any():
            return f"has another first class in {int(moved.sum())} of {moved.numel()} rows where eager's is clear"
        return ""

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

    def problem(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        """See `Measure.problem`."""
        a, b = widened(got), widened(expected)
        if not b.numel():
            return ""
        # Two vectors of zeros are equal, but have no direction.
        same = (a == b).all(-1)
        cosine = torch.where(same, 1.0, torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-30))
        worst = float(cosine.min())
        if not worst >= self.bound:
            return f"has a row of cosine {worst:.6f}, less than {KEY}.{self.name} {self.bound:g}"
        return ""


@dataclass(frozen=True)
class Relative(Measure):
    """Differences are small in the mean, relative to eager's mean."""

    bound: float = 0.01
    name = "relative"

    def problem(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        """See `Measure.problem`."""
        a, b = widened(got), widened(expected)
        if not b.numel() or torch.equal(a, b):
            return ""
        scale = float(b.abs().mean())
        error = float((a - b).abs().mean()) / scale if scale else float("inf")
        if not error <= self.bound:
            return f"differs by {error:.3g} of its mean, more than {KEY}.{self.name} {self.bound:g}"
        return ""


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
