"""What ran where, and why: the records (tracker), the public report, and its renderers."""

from torchserve_openvino.report.report import CompileReport, Summary
from torchserve_openvino.report.tracker import FALLBACK_KINDS, Fallback, FallbackKind, Tracker

__all__ = ["FALLBACK_KINDS", "CompileReport", "Fallback", "FallbackKind", "Summary", "Tracker"]
