"""What a compiled model has to pass before READY: answers equal to eager PyTorch's."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torchserve_openvino.config.sections import OpenVINOSection
from torchserve_openvino.errors import VerificationError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification import verify

logger = logging.getLogger(__name__)


class Admission:
    """Compares and judges one model.

    Args:
        eager: The model in PyTorch.
        section: ``handler.openvino``.
        cases: Calls of which inputs are known; empty where nothing is.
        part: Path of a module that is compiled by itself; empty for the model.

    Attributes:
        skipped: Why answers are not compared with eager's; empty where they are.
    """

    def __init__(self, eager: Any, section: OpenVINOSection, cases: Sequence[Case], part: str = "") -> None:
        self._eager, self._section, self._cases, self._part = eager, section, cases, part
        self.skipped = self._why_skipped()

    def _why_skipped(self) -> str:
        if self._section.verify.against == "off":
            return "handler.openvino.verify.against is off"
        if getattr(self._eager, "training", False):
            return (
                "the model is in training mode, in which answers are drawn anew or keep state; call model.eval(), also "
                "before torch.export.export"
            )
        if not self._cases:
            return "nothing is known of the model's inputs; declare handler.openvino.warmup.inputs or warmup.samples"
        return ""

    def require(self) -> None:
        """Looks, before anything is compiled, whether the comparison that is required can be made.

        Raises:
            VerificationError: It can't.
        """
        if self._section.verify.required and self.skipped:
            raise VerificationError(f"handler.openvino.verify.required is not met: {self.skipped}.")

    def note_skipped(self, report: CompileReport, name: str) -> None:
        """Says in the report and the log that nothing was compared, and why."""
        report.tracker.verify.state({"skipped": self.skipped}, self._part)
        logger.warning("%s is not verified: %s", name, self.skipped)

    def compare(self, model: Callable[..., Any], report: CompileReport, precision: str | None = None) -> dict[str, Any]:
        """The result of `verify.compare`, at the precision named or else the report's."""
        used = precision or report.summary.precision or "f32"
        return verify.compare(model, self._eager, self._cases, precision=used, section=self._section.verify)

    def judge(self, report: CompileReport, result: dict[str, Any]) -> None:
        """Writes a comparison into the report.

        Raises:
            VerificationError: Answers differ, and ``verify.on_violation`` is ``refuse``.
        """
        report.tracker.verify.state(result, self._part)
        if result["passed"]:
            return
        message = f"{self._part}: {verify.failure(result)}" if self._part else verify.failure(result)
        if self._section.verify.on_violation == "refuse":
            raise VerificationError(message)
        logger.warning("Verification: %s", message)
