"""Whether a compiled model is good enough for its user."""

from torchserve_openvino.config.sections import FallbackSection
from torchserve_openvino.report import CompileReport


def violations(report: CompileReport, policy: FallbackSection) -> list[str]:
    """What the report shows and ``handler.openvino.fallback`` does not allow, a sentence each."""
    found = []
    if policy.allow != "all":
        for fallback in report.fallbacks:
            if fallback.kind not in policy.allow:
                where = f" at {fallback.where}" if fallback.where else ""
                found.append(
                    f"{fallback.kind}: {fallback.op} ran on {fallback.to}{where} ({fallback.reason.splitlines()[0]})"
                )
    summary = report.summary
    if summary.graphs and summary.coverage < policy.min_coverage:
        found.append(
            f"coverage is {summary.coverage:.1%} ({summary.ops_on_openvino} of {summary.ops_total} ops on OpenVINO), "
            f"below min_coverage {policy.min_coverage:.1%}"
        )
    return found
