"""What ran where, and why: the records (tracker), the public report, and its renderers."""

from torchserve_openvino.config.vocabulary import FALLBACK_KINDS, FallbackKind
from torchserve_openvino.report.compile_report import CompileReport, Summary
from torchserve_openvino.report.records import Fallback
from torchserve_openvino.report.tracker import Tracker

__all__ = ["FALLBACK_KINDS", "CompileReport", "Fallback", "FallbackKind", "Summary", "Tracker"]
