"""Regression tests for what the composition fuzzer found: runs each case in tests/fuzz_cases."""

import json
from pathlib import Path

import pytest

from fuzzing.program import Program
from fuzzing.run import run

_CASES = sorted((Path(__file__).parents[2] / "fuzz_cases").glob("*.json"))


@pytest.mark.parametrize("path", _CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = json.loads(path.read_text("utf-8"))
    program = Program.from_dict(case["program"])
    result = run(program)
    assert result.outcome == case.get("outcome", "ok"), (
        f"{result.outcome} {result.kind}: {result.detail}\n{program.source()}"
    )
