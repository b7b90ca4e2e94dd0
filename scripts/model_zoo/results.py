"""Collects outcomes by architecture, and renders them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openvino
import torch

from model_zoo.catalog import Architecture
from model_zoo.grid import Case
from model_zoo.outcome import FAILURES, RIGHT, Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- architectures -->", "<!-- end of architectures -->"
_MOST_REASONS = 3


@dataclass
class Row:
    """All cases of an architecture.

    Attributes:
        outcomes: Each case that ran, with its outcome.
        not_built: Why it could not be built, in each case.
    """

    architecture: Architecture
    outcomes: list[tuple[Case, Outcome]] = field(default_factory=list)
    not_built: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst verdict."""
        verdicts = {outcome.verdict for _, outcome in self.outcomes}
        return next((v for v in (*FAILURES, "upstream", RIGHT) if v in verdicts), "not built")

    @property
    def ran(self) -> list[Outcome]:
        """Outcomes with a report."""
        return [outcome for _, outcome in self.outcomes if outcome.ops]

    @property
    def kind(self) -> str:
        """Of its inputs."""
        return next((outcome.kind for _, outcome in self.outcomes if outcome.kind), "")

    @property
    def coverage(self) -> float:
        """The lowest coverage of a case."""
        return min((outcome.coverage for outcome in self.ran), default=0.0)

    @property
    def partitions(self) -> float:
        """The most partitions of a graph, on average over a case's graphs."""
        return max((outcome.partitions / max(1, outcome.graphs) for outcome in self.ran), default=0.0)

    @property
    def fallbacks(self) -> Counter[str]:
        """How many cases have each reason."""
        return Counter(reason for outcome in self.ran for reason in outcome.fallbacks)


class Results:
    """The outcomes of a run."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}

    def add(self, architecture: Architecture, case: Case, outcome: Outcome) -> None:
        """Adds a case."""
        row = self.rows.setdefault((architecture.source, architecture.name), Row(architecture))
        if outcome.verdict == "not built":
            row.not_built.append(outcome.detail)
        elif outcome.verdict != "skipped":
            row.outcomes.append((case, outcome))

    @property
    def failures(self) -> list[tuple[Architecture, Case, Outcome]]:
        """Cases that are wrong or did not end well."""
        return [
            (row.architecture, case, outcome)
            for row in self.rows.values()
            for case, outcome in row.outcomes
            if outcome.verdict in FAILURES
        ]

    def counts(self) -> Counter[str]:
        """Number of architectures by verdict."""
        return Counter(row.verdict for row in self.rows.values())

    def reasons(self) -> list[tuple[str, list[str]]]:
        """Reasons of fallbacks with their architectures, the most frequent first."""
        by_reason: dict[str, list[str]] = {}
        for row in self.rows.values():
            for reason in row.fallbacks:
                by_reason.setdefault(reason, []).append(row.architecture.name)
        return sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))

    def sorted_rows(self) -> list[Row]:
        """Failures first, then the least coverage."""
        rank = {verdict: number for number, verdict in enumerate((*FAILURES, "upstream", RIGHT, "not built"))}
        return sorted(self.rows.values(), key=lambda row: (rank[row.verdict], row.coverage, row.architecture.name))

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "versions": versions(),
            "counts": dict(self.counts()),
            "architectures": [
                {
                    "source": row.architecture.source, "name": row.architecture.name, "kind": row.kind,
                    "class": row.architecture.class_name, "verdict": row.verdict, "coverage": row.coverage,
                    "partitions": row.partitions, "not_built": sorted(set(row.not_built)),
                    "cases": [{**case.to_dict(), **outcome.to_dict()} for case, outcome in row.outcomes],
                }
                for row in self.sorted_rows()
            ],
            "reasons": dict(self.reasons()),
        }  # fmt: skip


def versions() -> dict[str, str]:
    """The versions that results hold for."""
    import transformers

    current = {"torch": torch.__version__, "openvino": openvino.get_version().split("-")[0]}
    return {**current, "transformers": transformers.__version__}


class Log:
    """A file with a line of JSON for each case that ran, so that a run can be continued.

    Args:
        path: The file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> Iterator[tuple[Architecture, Case, Outcome]]:
        """Yields the cases that ran."""
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                yield Architecture(**entry["architecture"]), Case(**entry["case"]), Outcome(**entry["outcome"])

    def append(self, architecture: Architecture, case: Case, outcome: Outcome) -> None:
        """Adds a case."""
        if self._path is not None:
            entry = {"architecture": vars(architecture), "case": case.to_dict(), "outcome": outcome.to_dict()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def markdown(results: Results) -> str:
    """The table of docs/conformance.md."""
    current, counts = versions(), results.counts()
    built = [row for row in results.sorted_rows() if row.verdict != "not built"]
    entire = sum(row.coverage == 1.0 and row.verdict == RIGHT for row in built)
    lines = [
        BEGIN,
        f"Made by `python scripts/architectures.py --write` with torch {current['torch']}, "
        f"OpenVINO {current['openvino']} and transformers {current['transformers']}: "
        f"{sum(len(row.outcomes) for row in built)} cases of {len(built)} "
        f"architectures, of which {counts[RIGHT]} are right in every case and {entire} run completely on OpenVINO. "
        "Coverage is the lowest of an architecture's cases, partitions the most of them per graph. `upstream`: "
        "torch.compile without OpenVINO differs in the same way.",
        "",
        "| Architecture | Inputs | Cases | Verdict | Coverage | Partitions | Fallbacks |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for row in sorted(built, key=lambda row: (row.architecture.source, row.architecture.name)):
        reasons = "; ".join(_cell(reason) for reason, _ in row.fallbacks.most_common(_MOST_REASONS))
        source = "" if row.architecture.source == "transformers" else f"{row.architecture.source}: "
        cells = (f"{source}{row.architecture.name}", row.kind, str(len(row.outcomes)), row.verdict)
        lines.append(f"| {' | '.join((*cells, f'{row.coverage:.3f}', f'{row.partitions:.1f}', reasons))} |")
    lines += ["", "Reasons of fallbacks, by the number of architectures:", ""]
    lines += [f"- {len(names)}: {_cell(reason)}" for reason, names in results.reasons()[:30]]
    left = [row for row in results.sorted_rows() if row.verdict == "not built"]
    lines += ["", f"Not built small, or with unknown inputs ({len(left)}): {_names(left)}.", END]
    return "\n".join(lines) + "\n"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(row.architecture.name for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def write(results: Results) -> None:
    """Replaces the table in docs/conformance.md."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{markdown(results).strip()}{after}", encoding="utf-8")
