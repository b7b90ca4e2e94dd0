"""Verifies before READY that a compiled model's answers equal eager PyTorch's."""

import logging
from collections.abc import Sequence
from typing import Any

from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.errors import VerificationError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification import verify
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.measures import CaseTimes, Measure, with_bounds

logger = logging.getLogger(__name__)

# Those in f32 keep the digits that a measure looks at; int8 has its own test when the archive is made.
_MEASURED = frozenset({"bf16", "f16"})


class Admission:
    """Verifies one model against eager PyTorch.

    Args:
        eager: The model in PyTorch.
        section: ``handler.openvino``.
        cases: Calls with known inputs; empty where none are known.
        part: Path of a module that is compiled by itself; empty for the whole model.
        measure: The task's own measure; None if numbers are all that is known of its outputs.

    Attributes:
        skipped: Why answers are not compared with eager's; empty where they are.
        times: Times of the cases in the last comparison, by name.
    """

    def __init__(
        self,
        eager: Any,
        section: OpenVINOSection,
        cases: Sequence[Case],
        part: str = "",
        measure: Measure | None = None,
    ) -> None:
        self._eager, self._section, self._cases, self._part = eager, section, cases, part
        self._answers = verify.EagerAnswers(eager)
        # A bound of another measure than a part's is for the task's model.
        bounds = section.verify.measure
        other = part and (measure is None or getattr(bounds, measure.name) is None)
        self._measure = measure if other else with_bounds(measure, bounds)
        self.skipped = self._why_skipped()
        self.times: dict[str, CaseTimes] = {}

    def _why_skipped(self) -> str:
        if self._section.verify.against == "off":
            return "handler.openvino.verify.against is off"
        if getattr(self._eager, "training", False):
            return (
                "the model is in training mode, in which answers may be random or stateful; call model.eval(), also "
                "before torch.export.export"
            )
        if not self._cases and self._section.warmup.samples:
            return "no sample shows a call of it that can be repeated; declare handler.openvino.warmup.inputs"
        if not self._cases:
            return "the model's inputs are unknown; declare handler.openvino.warmup.inputs or warmup.samples"
        return ""

    @property
    def bounds(self) -> dict[str, Any]:
        """Everything that a comparison's result depends on beside the answers, JSON-safe."""
        stated = self._section.verify.model_dump(include={"max_abs", "min_cosine", "min_top1"})
        return {**stated, "measure": self._measure.described() if self._measure is not None else None}

    def require(self) -> None:
        """Checks, before anything is compiled, whether a required comparison is possible.

        Raises:
            VerificationError: It is not.
        """
        self._require_without(self.skipped)

    def _require_without(self, reason: str) -> None:
        if self._section.verify.required and reason:
            raise VerificationError(f"handler.openvino.verify.required is not met: {reason}.")

    def note_skipped(self, report: CompileReport, name: str) -> None:
        """Records in the report and the log that nothing was compared, and why."""
        self._note(report, name, self.skipped)

    def _note(self, report: CompileReport, name: str, why: str) -> None:
        report.tracker.verify.state({"skipped": why}, self._part)
        logger.warning("%s is not verified: %s", name, why)

    def judge_in(self, precision: str) -> Judge:
        """Returns what judges answers in a precision."""
        measure = self._measure if precision in _MEASURED else None
        return Judge(precision, self._section.verify, measure, must_meet=self._section.precision == "auto")

    def compare(
        self, model: ServedModel, report: CompileReport, precision: str | None = None,
        cases: Sequence[Case] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns the result of `verify.compare` for ``precision``, by default and in int8 the report's.

        Args:
            model: The compiled model.
            report: Its report.
            precision: Decides the tolerance.
            cases: The calls to compare; by default all.
        """
        own = report.summary.precision
        judge = self.judge_in(own if own == "int8" else precision or own or "f32")
        return verify.compare(
            model, self._answers, self._cases if cases is None else cases, judge, self.times, poisoned=model.poisoned
        )

    def judge(self, report: CompileReport, result: dict[str, Any]) -> None:
        """Records a comparison in the report and acts on a failed one.

        Raises:
            VerificationError: Answers differ, and ``verify.on_violation`` is ``refuse``; or they hold nothing to
                compare, and ``verify.required`` is true.
        """
        if result["passed"] and not result["value_sets"]["compared"]:
            self._require_without(verify.NOTHING)
            self._note(report, self._part or "self.model", verify.NOTHING)
            return
        report.tracker.verify.state(result, self._part)
        if result["passed"]:
            return
        message = f"{self._part}: {verify.failure(result)}" if self._part else verify.failure(result)
        if self._section.verify.on_violation == "refuse":
            raise VerificationError(message)
        logger.warning("Verification: %s", message)
