"""Merges the results of several test runs into one table: tests, failures and seconds of each folder.

The files are pytest's own (`--junitxml`), as `scripts/test.sh` leaves them in .quickstart/results/.

    python scripts/test_results.py .quickstart/results/*.xml
    python scripts/test_results.py --json results.xml
    python scripts/test_results.py --write-durations .quickstart/results/*.xml
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"


@dataclass
class Results:
    """Results of the tests of one folder.

    Attributes:
        failed: Names of the tests that failed, or could not be set up.
        seconds: Their time in all processes together.
    """

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main(
    files: Annotated[list[Path], typer.Argument(help="pytest's XML files.", exists=True)],
    write_durations: Annotated[
        bool, typer.Option("--write-durations", help="Note how long each test took in tests/durations.json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Merges the results of several test runs into one table. The exit status is 1 if a test failed.

    Examples: test_results.py .quickstart/results/*.xml; test_results.py --write-durations results.xml
    """
    testcases = (case for file in files for case in ET.parse(file).iter("testcase"))
    # A whole file has a line without a test: skipped, which counts for nothing, or not imported, which is an error.
    cases = [case for case in testcases if case.get("classname") or case.find("skipped") is None]
    folders = _by_folder(cases)
    if write_durations:
        _write_durations(cases)
    if as_json:
        typer.echo(json.dumps({name: asdict(results) for name, results in folders.items()}))
    else:
        Console().print(_table(folders))
    failed = [name for results in folders.values() for name in results.failed]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    raise typer.Exit(1 if failed or not cases else 0)


def _by_folder(cases: list[ET.Element]) -> dict[str, Results]:
    folders = defaultdict[str, Results](Results)
    for case in cases:
        results = folders[_folder(_file(case))]
        results.seconds += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            results.failed.append(f"{_file(case)}::{case.get('name')}" if case.get("classname") else _file(case))
        elif case.find("skipped") is not None:
            results.skipped += 1
        else:
            results.passed += 1
    return dict(sorted(folders.items()))


def _file(case: ET.Element) -> str:
    """Returns a test's file: its class name is the dotted path, and a class in it, if it has one; or its name is."""
    parts = (case.get("classname") or case.get("name", "")).split(".")
    while parts and not parts[-1].startswith("test_"):
        parts.pop()
    return "/".join(parts) + ".py"


def _folder(file: str) -> str:
    return str(Path(file).parent)


def _table(folders: dict[str, Results]) -> Table:
    table = Table("folder", *("passed", "skipped", "failed", "CPU minutes"))
    total = Results()
    for name, results in folders.items():
        table.add_row(name, *_row(results))
        total.passed += results.passed
        total.skipped += results.skipped
        total.failed += results.failed
        total.seconds += results.seconds
    table.add_section()
    table.add_row("all", *_row(total))
    return table


def _row(results: Results) -> list[str]:
    return [str(results.passed), str(results.skipped), str(len(results.failed)), f"{results.seconds / 60:.1f}"]


def _write_durations(cases: list[ET.Element]) -> None:
    """Notes the mean seconds of each test's cases, and keeps what is known of tests that did not run now."""
    seconds = defaultdict[str, list[float]](list)
    for case in (case for case in cases if case.get("classname")):
        # In a class, the test's own name has the class before it.
        inner = case.get("classname", "").split(".")[len(Path(_file(case)).parts) :]
        name = "::".join([_file(case), *inner, case.get("name", "").partition("[")[0]])
        seconds[name].append(float(case.get("time", 0)))
    known = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
    known = {name: item for name, item in known.items() if (ROOT / name.partition("::")[0]).exists()}
    known |= {name: round(sum(times) / len(times), 2) for name, times in seconds.items()}
    DURATIONS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
