"""Checks a compiled model against the fallback policy of its configuration: at load, and at every call after it."""

import logging
from collections.abc import Sequence

from torchserve_openvino.config.sections.handler import FallbackSection
from torchserve_openvino.errors import ForbiddenFallbackError, PolicyViolationError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.report.tracker import Fallback

logger = logging.getLogger(__name__)


def violations(report: CompileReport, policy: FallbackSection) -> list[str]:
    """Returns what the report shows and ``handler.openvino.fallback`` does not allow, a sentence each."""
    found = [_sentence(fallback) for fallback in _forbidden(report.fallbacks, policy)]
    summary = report.summary
    if (summary.graphs or summary.ops_total) and summary.coverage < policy.min_coverage:
        found.append(
            f"coverage is {summary.coverage:.1%} ({summary.ops_on_openvino} of {summary.ops_total} ops on OpenVINO), "
            f"below min_coverage {policy.min_coverage:.1%}"
        )
    return found


def admit(report: CompileReport, policy: FallbackSection) -> None:
    """Checks what ran before READY against ``handler.openvino.fallback``.

    Raises:
        PolicyViolationError: More falls back than is allowed, and ``on_violation`` is ``refuse``.
    """
    found = violations(report, policy)
    if found and policy.on_violation == "refuse":
        raise PolicyViolationError("handler.openvino.fallback is not met: " + "; ".join(found))
    for sentence in found:
        logger.warning("handler.openvino.fallback: %s", sentence)


def _forbidden(fallbacks: Sequence[Fallback], policy: FallbackSection) -> list[Fallback]:
    return [] if policy.allow == "all" else [f for f in fallbacks if f.kind not in policy.allow]


def _sentence(fallback: Fallback) -> str:
    where = f" at {fallback.where}" if fallback.where else ""
    reason = (fallback.reason.splitlines() or [""])[0]
    return f"{fallback.kind}: {fallback.op} ran on {fallback.to}{where} ({reason})"


class PolicyWatch:
    """Finds, after each call, what the policy does not allow.

    Args:
        report: The report of the model that this worker serves.
        policy: ``handler.openvino.fallback``.

    Attributes:
        violations: What was found since READY; if not empty, the worker is reported as violating the policy.
        replace: Whether the worker should be replaced: it may fail again on the next request.
    """

    def __init__(self, report: CompileReport, policy: FallbackSection) -> None:
        self._report = report
        self._policy = policy
        self._known = self._counts()
        self._coverage_failed = self._below()
        self._revision = report.revision
        self.violations: list[str] = []
        self.replace = False

    def _counts(self) -> dict[int, int]:
        return {id(f): f.count for f in self._report.fallbacks}

    def _below(self) -> bool:
        summary = self._report.summary
        return bool(summary.graphs or summary.ops_total) and summary.coverage < self._policy.min_coverage

    def check(self) -> None:
        """Checks what a call added to the report; cheap if it added nothing.

        Raises:
            ForbiddenFallbackError: The call fell back in a way that is not allowed, and ``on_violation`` is ``refuse``.
        """
        if self._report.revision == self._revision:
            return
        self._revision = self._report.revision
        grown = [f for f in self._report.fallbacks if f.count > self._known.get(id(f), 0)]
        self._known = self._counts()
        found = _forbidden(grown, self._policy)
        sentences = [_sentence(f) for f in found]
        by_request = bool(found) and all(f.caused_by_request for f in found)
        if self._below() and not self._coverage_failed:
            self._coverage_failed = True
            by_request = False
            sentences.append(f"coverage fell below min_coverage {self._policy.min_coverage:.1%}")
        if not sentences:
            return
        self.violations += [s for s in sentences if s not in self.violations]
        for sentence in sentences:
            logger.warning("handler.openvino.fallback: after READY: %s", sentence)
        if self._policy.on_violation == "refuse":
            self.replace |= not by_request
            raise ForbiddenFallbackError("; ".join(sentences), by_request=by_request)

    def broken(self, sentence: str) -> None:
        """Records a violation other than a fallback, and marks the worker for replacement."""
        if sentence not in self.violations:
            self.violations.append(sentence)
        self.replace = True
