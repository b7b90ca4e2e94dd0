"""The checked-in tables: what each operator came to, one line an operator, so that a diff names what changed."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import openvino
import torch

from conformance.outcome import FAILURES, NO_WORK, ON_OPENVINO, OUTCOMES

# Operator to dtype (or `core`) to outcome with its reasons.
Table = dict[str, dict[str, str]]

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "conformance"
OP_DB = FOLDER / "op_db.json"
CORE = FOLDER / "core_aten.json"
SUMMARY = FOLDER / "SUMMARY.md"
# Better ones first; what is not there is as bad as it gets.
_RANK = {name: rank for rank, name in enumerate(OUTCOMES)}


def op_db_path(mode: str) -> Path:
    """The table of a mode."""
    return OP_DB if mode == "static" else FOLDER / f"op_db_{mode}.json"


def versions() -> dict[str, str]:
    """What a table was made with."""
    return {"torch": torch.__version__, "openvino": openvino.get_version().split("-")[0]}


def read(path: Path) -> Table:
    """A checked-in table; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))["outcomes"] if path.exists() else {}


def write(path: Path, table: Table) -> None:
    """Sorted, one operator a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(dict(sorted(table[name].items())))}" for name in sorted(table)]
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"versions": {json.dumps(versions())},\n"outcomes": {{\n{body}\n}}}}\n', encoding="utf-8")


def outcome_name(entry: str) -> str:
    """``fallback`` of ``fallback: aten.bincount.default ...``."""
    return entry.split(":", 1)[0]


def counts(table: Table) -> dict[str, Counter[str]]:
    """How often each outcome came, by dtype."""
    found: dict[str, Counter[str]] = {}
    for entries in table.values():
        for dtype, entry in entries.items():
            found.setdefault(dtype, Counter())[outcome_name(entry)] += 1
    return found


def share(table: Table) -> float:
    """The part of all entries with something to compute that ran on OpenVINO, whole or decomposed; 0..1."""
    names = [outcome_name(entry) for entries in table.values() for entry in entries.values()]
    return sum(name in ON_OPENVINO for name in names) / max(1, sum(name != NO_WORK for name in names))


def compare(fresh: Table, known: Table) -> tuple[list[str], list[str]]:
    """What got worse (or was wrong), and what got better, in sentences.

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
    """The tables' figures in Markdown.

    Args:
        op_db: Mode to its table.
        core: Of the core ATen overloads.
    """
    made = versions()
    op_db = {mode: table for mode, table in op_db.items() if table}
    lines = [
        "# Conformance: torch's operator database against eager PyTorch",
        "",
        f"Made by `python scripts/op_conformance.py --modes {','.join(op_db)} --write` with torch {made['torch']}, "
        f"OpenVINO {made['openvino']}.",
        "Every operator runs on up to five of torch's own samples in each type; each answer is compared with eager.",
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
        if outcome_name(entry) not in ON_OPENVINO
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
