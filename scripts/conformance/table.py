"""The checked-in tables of outcomes: one line per operator, so that a diff names what changed."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import openvino
import torch

from conformance.outcome import FAILURES, NO_WORK, ON_OPENVINO, OUTCOMES

# Maps operator and dtype (or `core`) to an outcome with its reasons.
Table = dict[str, dict[str, str]]

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "conformance"
OP_DB = FOLDER / "op_db.json"
CORE = FOLDER / "core_aten.json"
SUMMARY = FOLDER / "SUMMARY.md"
# Most samples of an operator in the tables.
SAMPLES = 5
# Better outcomes first; unknown ones rank last.
_RANK = {name: rank for rank, name in enumerate(OUTCOMES)}


def op_db_path(mode: str) -> Path:
    """Path of a mode's table."""
    return OP_DB if mode == "static" else FOLDER / f"op_db_{mode}.json"


def versions() -> dict[str, str]:
    """The versions that a table is made with."""
    return {"torch": torch.__version__, "openvino": openvino.get_version().split("-")[0]}


def read(path: Path) -> Table:
    """Reads a checked-in table; empty if there is none."""
    return json.loads(path.read_text(encoding="utf-8"))["outcomes"] if path.exists() else {}


def write(path: Path, table: Table) -> None:
    """Writes a table, sorted, one line per operator."""
    lines = [f"  {json.dumps(name)}: {json.dumps(dict(sorted(table[name].items())))}" for name in sorted(table)]
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"versions": {json.dumps(versions())},\n"outcomes": {{\n{body}\n}}}}\n', encoding="utf-8")


def outcome_name(entry: str) -> str:
    """The outcome of an entry: ``fallback`` for ``fallback: aten.bincount.default ...``."""
    return entry.split(":", 1)[0]


def counts(table: Table) -> dict[str, Counter[str]]:
    """Number of entries with each outcome, by dtype."""
    by_kind: dict[str, Counter[str]] = {}
    for entries in table.values():
        for dtype, entry in entries.items():
            by_kind.setdefault(dtype, Counter())[outcome_name(entry)] += 1
    return by_kind


def share(table: Table) -> float:
    """Share (0..1) of the entries other than `no_work` that ran on OpenVINO, whole or decomposed."""
    names = [outcome_name(entry) for entries in table.values() for entry in entries.values()]
    return sum(name in ON_OPENVINO for name in names) / max(1, sum(name != NO_WORK for name in names))


def compare(fresh: Table, known: Table) -> tuple[list[str], list[str]]:
    """Regressions (with all failures) and improvements, as text.

    Args:
        fresh: Outcomes of this run, perhaps of some operators only.
        known: The checked-in table.
    """
    worse, better = [], []
    for name, entries in sorted(fresh.items()):
        for dtype, entry in sorted(entries.items()):
            was, now = outcome_name(known.get(name, {}).get(dtype, "not in the table")), outcome_name(entry)
            if now in FAILURES or _rank(now) > _rank(was):
                worse.append(f"{name} {dtype}: {entry} (was {was})")
            elif now != was:
                better.append(f"{name} {dtype}: {now} (was {was})")
    return worse, better


def _rank(name: str) -> int:
    return _RANK.get(name, len(_RANK))


def summary(op_db: Mapping[str, Table], core: Table) -> str:
    """Summary of the tables in Markdown.

    Args:
        op_db: Tables by mode.
        core: Table of the core ATen overloads.
    """
    current = versions()
    op_db = {mode: table for mode, table in op_db.items() if table}
    lines = [
        "# Conformance: torch's operator database against eager PyTorch",
        "",
        f"Made by `python scripts/op_conformance.py --modes {','.join(op_db)} --write` with torch {current['torch']}, "
        f"OpenVINO {current['openvino']}.",
        f"Every operator runs on up to {SAMPLES} of torch's own samples in each type; "
        "each answer is compared with eager.",
        "",
        "| Outcome | " + " | ".join(op_db) + " | Meaning |",
        "| --- |" + " ---: |" * len(op_db) + " --- |",
    ]
    by_mode = {mode: sum(counts(table).values(), Counter()) for mode, table in op_db.items()}
    for name in (*OUTCOMES, *FAILURES):
        cells = [str(by_mode[mode][name]) for mode in op_db]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_MEANING[name]} |")
    lines.append("| all | " + " | ".join(str(by_mode[mode].total()) for mode in op_db) + " | |")
    by_dtype = counts(op_db["static"])
    lines += ["", "The static graphs by type:", "", "| Outcome | " + " | ".join(by_dtype) + " |"]
    lines.append("| --- |" + " ---: |" * len(by_dtype))
    for name in (*OUTCOMES, *FAILURES):
        lines.append(f"| {name} | " + " | ".join(str(by_dtype[dtype][name]) for dtype in by_dtype) + " |")
    on = counts(core).get("core", Counter())
    lines += [
        "",
        f"Core ATen, forward: {sum(on[n] for n in ON_OPENVINO)} of the {on.total() - on[NO_WORK]} overloads that "
        f"compute something run on OpenVINO ({share(core):.1%}). The others:",
        "",
    ]
    lines += [
        f"- `{name}`: {entry}"
        for name, entries in sorted(core.items())
        for entry in entries.values()
        if outcome_name(entry) not in (*ON_OPENVINO, NO_WORK)
    ]
    return "\n".join(lines) + "\n"


_MEANING: Mapping[str, str] = {
    "openvino": "all on OpenVINO, the operator whole",
    "decomposed": "all on OpenVINO, as other operators",
    "no_work": "a view of its input, or empty: nothing to compute",
    "mixed": "some samples or parts in eager PyTorch, with the reason",
    "fallback": "in eager PyTorch, with the reason",
    "not_traceable": "Dynamo can't trace it, with its reason",
    "eager_refuses": "eager PyTorch itself refuses every sample",
    "WRONG": "another answer than eager",
    "CRASH": "the process ended",
    "TIMEOUT": "took too long",
}
