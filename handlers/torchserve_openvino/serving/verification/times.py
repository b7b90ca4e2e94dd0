"""Times of the calls that verification makes anyway."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CaseTimes:
    """Times of one case.

    Attributes:
        eager: Seconds of the fastest call in eager PyTorch.
        compiled: Seconds of the slowest call of the compiled model.
    """

    eager: float
    compiled: float

    def merged(self, other: "CaseTimes") -> "CaseTimes":
        """Returns the times of both."""
        return CaseTimes(min(self.eager, other.eager), max(self.compiled, other.compiled))
