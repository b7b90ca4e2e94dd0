"""What comparisons of one model with eager PyTorch found, as plain data of the report."""

from collections.abc import Callable
from typing import Any


class VerifyRecord:
    """The report's entry ``verify``; every value is JSON-safe.

    Args:
        changed: Called after each change.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._facts: dict[str, Any] = {}

    def state(self, result: dict[str, Any], part: str = "") -> None:
        """Records the result for the model, or for a part of it that is compiled separately."""
        if part:
            result = {**self._facts, "parts": {**self._facts.get("parts", {}), part: result}}
        self._facts = result
        self._changed()

    def state_first(self, compared: int, mismatches: int, worst: float) -> None:
        """Records how many new graphs were compared at their first call, and the largest difference."""
        # Infinity is no JSON.
        figures = {"compared": compared, "mismatches": mismatches, "worst": worst if worst < float("inf") else "inf"}
        self._facts = {**self._facts, "against": "eager", "passed": not mismatches, **figures}
        self._changed()

    def state_shadow(self, facts: dict[str, Any]) -> None:
        """Records what the comparison of some requests has found so far."""
        if facts != self.shadow:
            self._facts = {**self._facts, "shadow": facts}
            self._changed()

    @property
    def shadow(self) -> dict[str, Any]:
        """What `state_shadow` recorded; empty if ``verify.shadow`` is 0."""
        shadow: dict[str, Any] = self._facts.get("shadow", {})
        return shadow

    @property
    def passed(self) -> bool:
        """Whether the outputs of the model and of all its parts were compared with eager PyTorch's, and matched."""
        parts = self._facts.get("parts", {})
        whole = self._facts.get("passed", bool(parts) and "skipped" not in self._facts) is True
        return whole and all(part.get("passed") is True for part in parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns everything that was recorded."""
        return self._facts
