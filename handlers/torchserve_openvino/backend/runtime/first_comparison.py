"""Compares results of new graphs with eager PyTorch's, for the option ``verify: first``, and records the outcome."""

import threading
from typing import Any

import torch

from torchserve_openvino.backend.runtime.compare import difference, largest_difference
from torchserve_openvino.errors import VerificationError
from torchserve_openvino.report.tracker import Tracker


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
