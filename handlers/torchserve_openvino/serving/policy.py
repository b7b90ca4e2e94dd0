"""Checks a compiled model against the fallback policy of its configuration: at load, and at every call after it."""

import logging
from collections.abc import Sequence

from torchserve_openvino.config.sections.openvino_section import FallbackSection
from torchserve_openvino.errors import ForbiddenFallbackError, PolicyViolationError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.report.records import Fallback

logger = logging.getLogger(__name__)


def violations(report: CompileReport, policy: FallbackSection) -> list[str]:
    """Returns what the report shows and ``handler.openvino.fallback`` does not allow, a sentence each."""
    sentences = [_sentence(fallback) for fallback in _forbidden(report.fallbacks, policy)]
    summary = report.summary
    if (summary.graphs or summary.ops_total) and summary.coverage < policy.min_coverage:
        sentences.append(
            f"coverage is {summary.coverage:.1%} ({summary.ops_on_openvino} of {summary.ops_total} ops on OpenVINO), "
            f"below min_coverage {policy.min_coverage:.1%}"
        )
    return sentences


def admit(report: CompileReport, policy: FallbackSection) -> None:
    """Checks what ran before READY against ``handler.openvino.fallback``.

    Raises:
        PolicyViolationError: More falls back than is allowed, and ``on_violation`` is ``refuse``.
    """
    sentences = violations(report, policy)
    if sentences and policy.on_violation == "refuse":
        raise PolicyViolationError("handler.openvino.fallback is not met: " + "; ".join(sentences))
    for sentence in sentences:
        logger.warning("handler.openvino.fallback: %s", sentence)


def _forbidden(fallbacks: Sequence[Fallback], policy: FallbackSection) -> list[Fallback]:
    return [] if policy.allow == "all" else [f for f in fallbacks if f.kind not in policy.allow]


def _sentence(fallback: Fallback) -> str:
    where = f" at {fallback.where}" if fallback.where else ""
    reason = (fallback.reason.splitlines() or [""])[0]
    return f"{fallback.kind}: {fallback.op} ran on {fallback.to}{where} ({reason})"


# Kinds that OpenVINO itself may cause at any call: whether a worker can go on shows only at the next ones.
_FAILURES = frozenset({"runtime_failed"})
# Kinds that are counted when a graph is compiled, and not again at its later calls.
_AT_COMPILATION = frozenset(
    {"unsupported_op", "disabled_op", "tiny_partition", "slower", "conversion_failed", "compile_failed", "compile_died",
     "graph_break"}
)  # fmt: skip


class PolicyWatch:
    """Finds, after each call, what the policy does not allow.

    A violation belongs to the requests of the call in which it happened, and to no others: they are refused. A graph
    that was compiled after READY and violates the policy is refused at each of its calls. A worker is replaced only if
    OpenVINO failed in two batches, one after the other, in none of which any call was right.

    Args:
        report: The report of the model that this worker serves.
        policy: ``handler.openvino.fallback``.

    Attributes:
        violations: What was found since READY, but for what requests' own values caused; if not empty, the worker is
            reported as violating the policy.
        replace: Whether the worker should be replaced: it may fail again on the next request.
    """

    def __init__(self, report: CompileReport, policy: FallbackSection) -> None:
        self._report = report
        self._policy = policy
        self._known = self._counts()
        self._coverage_failed = self._below()
        self._revision = report.revision
        self._graphs = len(report.tracker.graphs)
        # Why each graph that was compiled after READY is refused, by its index.
        self._refused: dict[int, str] = {}
        # Violations of single calls, which were refused, or from which OpenVINO may recover.
        self._passing: set[str] = set()
        self._failed = self._passed = self._suspect = False
        self.violations: list[str] = []
        self.replace = False
        report.tracker.notes_runs = policy.on_violation == "refuse"

    def _counts(self) -> dict[int, int]:
        return {id(f): f.count for f in self._report.fallbacks}

    def _below(self) -> bool:
        summary = self._report.summary
        return bool(summary.graphs or summary.ops_total) and summary.coverage < self._policy.min_coverage

    def begin(self) -> None:
        """Starts a batch: what was added since the last one is recorded, but is no fault of this batch's requests."""
        self._failed = self._passed = False
        self.skip()

    def skip(self) -> None:
        """Records what was added to the report without refusing a request: the call that added it was not answered."""
        self._look()
        self._report.tracker.ran.clear()

    def check(self, request: str = "") -> None:
        """Checks what a call added to the report; cheap if it added nothing.

        Args:
            request: Whose call it was, for the log: TorchServe's id of a request.

        Raises:
            ForbiddenFallbackError: The call fell back in a way that is not allowed, and ``on_violation`` is ``refuse``.
        """
        sentences, kinds, by_request = self._look()
        if not sentences and self._refused:
            ran, by_request = self._report.tracker.ran, False
            sentences = [self._refused[index] for index in sorted(self._refused.keys() & ran)]
        self._report.tracker.ran.clear()
        if self._policy.on_violation != "refuse" or not sentences:
            self._passed = True
            return
        logger.warning("handler.openvino.fallback: %s is refused: %s", request or "a batch", "; ".join(sentences))
        self._failed |= not by_request and bool(kinds & _FAILURES)
        raise ForbiddenFallbackError("; ".join(dict.fromkeys(sentences)), by_request=by_request)

    def end(self) -> bool:
        """Ends a batch; returns True if the worker has to be replaced now, in the last call that it spoils."""
        failed = self._failed and not self._passed
        again, self._suspect = self._suspect and failed, failed or (self._suspect and not self._passed)
        self.replace |= again
        return again

    def _look(self) -> tuple[list[str], set[str], bool]:
        """Records new violations.

        Returns:
            A sentence for each, their kinds, and whether the requests' own values caused them all.
        """
        if self._report.revision == self._revision:
            return [], set(), True
        self._revision = self._report.revision
        grown = [f for f in self._report.fallbacks if f.count > self._known.get(id(f), 0)]
        self._known = self._counts()
        graphs = self._report.tracker.graphs
        added, self._graphs = graphs[self._graphs :], len(graphs)
        forbidden = _forbidden(grown, self._policy)
        sentences = [_sentence(f) for f in forbidden]
        by_request = all(f.caused_by_request for f in forbidden)
        own = [_sentence(f) for f in forbidden if not f.caused_by_request]
        refuses = self._policy.on_violation == "refuse"
        self._passing |= {_sentence(f) for f in forbidden if refuses or f.kind in _FAILURES}
        kinds: set[str] = {f.kind for f in forbidden}
        if self._below():
            lost = any(graph.ops_on_openvino < graph.ops_total for graph in added)
            if lost or not self._coverage_failed:
                kinds.add("unsupported_op")
                by_request = False
                fell = f"coverage fell below min_coverage {self._policy.min_coverage:.1%}"
                sentences.append(fell)
                own.append(fell)
                if refuses:
                    self._passing.add(fell)
            self._coverage_failed = True
        if kinds & _AT_COMPILATION:
            self._refused |= {
                graph.index: "; ".join(sentences)
                for graph in added
                if "graph_break" in kinds or graph.ops_on_openvino < graph.ops_total
            }
        self.violations += [s for s in own if s not in self.violations]
        for sentence in sentences:
            logger.warning("handler.openvino.fallback: after READY: %s", sentence)
        return sentences, kinds, by_request

    @property
    def standing(self) -> list[str]:
        """Violations that concern requests to come: all of a worker that has to be replaced."""
        return [s for s in self.violations if self.replace or s not in self._passing]

    def probed(self) -> str:
        """Looks at what a health check's own call added; returns what the policy does not allow of it, if anything.

        OpenVINO that failed in the last batch, and in this call, is replaced; one that answers has recovered.
        """
        sentences, kinds, _ = self._look()
        self._report.tracker.ran.clear()
        failed = bool(kinds & _FAILURES) and self._policy.on_violation == "refuse"
        self.replace |= failed and self._suspect
        self._suspect = failed
        return "; ".join(sentences)

    def broken(self, sentence: str) -> None:
        """Records a violation other than a fallback, and marks the worker for replacement."""
        if sentence not in self.violations:
            self.violations.append(sentence)
        self.replace = True
