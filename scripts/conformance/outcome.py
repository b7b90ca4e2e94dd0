"""The outcome of an operator's samples: one word with its reasons."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torchserve_openvino as tov

# From best to worst. `no_work`: a view or an empty result, nothing to compute.
ON_OPENVINO = ("openvino", "decomposed")
NO_WORK = "no_work"
OUTCOMES = (*ON_OPENVINO, NO_WORK, "mixed", "fallback", "not_traceable", "eager_refuses")
FAILURES = ("WRONG", "CRASH", "TIMEOUT")
# A reason from the support table: an empty tensor does not make an operator unsupported.
_EMPTY = "nothing to compute"
_REASON_LENGTH = 160


@dataclass(frozen=True)
class Outcome:
    """The outcome of one operator in one dtype, or of one sample.

    Attributes:
        name: One of `OUTCOMES` or `FAILURES`.
        reasons: Why not all of it ran on OpenVINO, sorted.
    """

    name: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}" if self.reasons else self.name


def judge(report: tov.CompileReport, decomposed: bool) -> Outcome:
    """The outcome of samples whose answers were correct.

    Args:
        report: Report of the compiled samples.
        decomposed: Whether an operator of the lowered graph came from a decomposition.
    """
    summary = report.summary
    reasons = tuple(sorted({short(f.op, f.reason) for f in report.fallbacks if _EMPTY not in f.reason}))
    if summary.graph_breaks or any(f.kind == "graph_break" for f in report.fallbacks):
        return Outcome("not_traceable", reasons)
    empty = sum(f.count for f in report.fallbacks if _EMPTY in f.reason)
    total = summary.ops_total - empty
    if total <= 0 and not any(f.kind == "conversion_failed" for f in report.fallbacks):
        return Outcome("no_work")
    if not reasons and summary.ops_on_openvino == total:
        return Outcome("decomposed" if decomposed else "openvino")
    return Outcome("mixed" if summary.ops_on_openvino and not _all_refused(report) else "fallback", reasons)


def _all_refused(report: tov.CompileReport) -> bool:
    """Whether every partition fell back to eager at the call."""
    failed = {f.op for f in report.fallbacks if f.kind == "runtime_failed"}
    return bool(failed) and len(failed) >= report.summary.partitions


def merge(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of all samples together."""
    counted = [outcome for outcome in outcomes if outcome.name != "eager_refuses"]
    if not counted:
        return Outcome("eager_refuses")
    for failure in FAILURES:
        if hits := [outcome for outcome in counted if outcome.name == failure]:
            return hits[0]
    reasons = tuple(sorted({reason for outcome in counted for reason in outcome.reasons}))
    names = {outcome.name for outcome in counted}
    if len(names) > 1:
        names.discard("no_work")
    if names <= set(ON_OPENVINO):
        return Outcome("decomposed" if "decomposed" in names else "openvino")
    return Outcome(names.pop() if len(names) == 1 else "mixed", reasons)


def short(op: str, reason: str) -> str:
    """Shortens a reason to one line that is the same on every machine: no paths, line numbers or addresses."""
    failed = "FrontEnd API failed" in reason or "OpConversionFailure" in reason or "Check '" in reason
    said = "its conversion fails" if failed else reason.split("\n", maxsplit=1)[0]
    said = re.sub(r"0x[0-9a-f]+|[\w/.-]*/[\w.-]+\.(py|cpp|hpp)(:\d+)?|graph \d+ / ", "", said)
    # A frame is named after its file, whose path differs between machines.
    nameless = op in {"python", "whole call", "a function"} or "openvino_" in op or ".py:" in op
    prefix = "" if op in said or nameless else f"{op}: "
    return f"{prefix}{said}"[:_REASON_LENGTH].strip()
