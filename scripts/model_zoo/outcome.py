"""The outcome of a case: its verdict, and what the report says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torchserve_openvino as tov

RIGHT = "right"
# `upstream`: torch.compile without OpenVINO does the same. `not built`: no small model, or no known inputs.
# `skipped`: equal to an earlier case of this architecture.
HARMLESS = (RIGHT, "upstream", "not built", "skipped")
FAILURES = ("WRONG", "ERROR", "CRASH", "TIMEOUT")


@dataclass
class Outcome:
    """The outcome of one case.

    Attributes:
        verdict: One of `HARMLESS` or `FAILURES`.
        detail: What differs, or why not.
        difference: The largest difference from eager, relative to the largest value of its output.
        kind: ``text``, ``vision``, ``audio`` or ``other``.
        fallbacks: Maps an operator with its reason to a count.
        seconds: Of the whole case.
    """

    verdict: str
    detail: str = ""
    difference: float = 0.0
    kind: str = ""
    coverage: float = 1.0
    ops: int = 0
    partitions: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    def add_report(self, report: tov.CompileReport) -> None:
        """Takes coverage and fallbacks of a report."""
        summary = report.summary
        self.coverage, self.ops = summary.coverage, summary.ops_total
        self.partitions, self.graphs, self.graph_breaks = summary.partitions, summary.graphs, summary.graph_breaks
        counts: Counter[str] = Counter()
        for fallback in report.fallbacks:
            counts[short_reason(fallback.kind, fallback.op, fallback.reason)] += fallback.count
        self.fallbacks = dict(counts.most_common())


def short_reason(kind: str, op: str, reason: str) -> str:
    """One line for a fallback, the same on every machine and for every size."""
    first = " ".join(reason.split("\n", maxsplit=1)[0].split())
    if kind in {"conversion_failed", "compile_failed"} or "Check '" in first:
        first = f"{kind}: {' '.join(reason.split())[-140:]}"
    first = re.sub(r"0x[0-9a-f]+|[\w/.-]*/[\w.-]+\.(py|cpp|hpp)(:\d+)?|graph \d+ / ", "", first)
    first = re.sub(r"\d+(, \d+)+", "...", first)
    name = re.sub(r"_\d+$", "", op)
    nameless = "openvino_" in op or ".py:" in op or op in {"python", "whole call", "a function"}
    return first[:160] if nameless or name in first else f"{name}: {first}"[:160]
