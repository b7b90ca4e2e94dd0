"""Shrinks a failing program: candidates run in a worker, and the first that fails alike replaces the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fuzzing import reduce
from fuzzing.program import Program
from isolation.process import Lost

Ask = Callable[[dict[str, Any]], dict[str, Any] | Lost]


def failure_kind(answer: dict[str, Any] | Lost) -> str:
    """Kind of failure in a worker's answer; empty if it is none."""
    if isinstance(answer, Lost):
        return answer.kind.lower()
    return answer["kind"] if answer["outcome"] == "failed" else ""


def shrink(program: Program, first: dict[str, Any] | Lost, ask: Ask, extra: dict[str, Any], seconds: float) -> Program:
    """The smallest program found that fails in the same way.

    Args:
        program: The failing program.
        first: Its answer.
        ask: Runs a task in a worker.
        extra: Fields of every task, as in the original run.
        seconds: Time limit, after which the smallest program so far is returned.
    """
    ends = time.monotonic() + seconds
    likeness = _likeness(first)
    best, answer = program, first
    tried: set[str] = set()

    def fails(candidate: Program) -> bool:
        nonlocal best, answer
        candidate = reduce.tidy(candidate)
        text = repr(candidate)
        if text in tried or not candidate.inputs:
            return False
        tried.add(text)
        said = ask({"program": candidate.to_dict(), **extra})
        if _likeness(said) != likeness:
            return False
        best, answer = candidate, said
        return True

    def rounds() -> Iterator[bool]:
        step = answer["step"] if isinstance(answer, dict) else len(best.mode.steps)
        yield _first(fails, reduce.fewer_results(best), ends)
        yield _first(fails, reduce.without_lines(best, _known(best, ask)), ends)
        yield _first(fails, reduce.simpler_modes(best, step), ends)
        yield _first(fails, reduce.simpler_inputs(best), ends)
        yield _first(fails, reduce.smaller_sizes(best), ends)

    fails(program)
    while time.monotonic() < ends and any(rounds()):
        pass
    return best


def _first(fails: Callable[[Program], bool], candidates: Iterator[Program], ends: float) -> bool:
    return any(fails(candidate) for candidate in candidates if time.monotonic() < ends)


def _known(program: Program, ask: Ask) -> dict[str, reduce.Known]:
    said = ask({"program": program.to_dict(), "describe": True})
    if isinstance(said, Lost) or said["outcome"] != "described":
        return {}
    return {name: reduce.Known.from_dict(value) for name, value in said["values"].items()}


def _likeness(answer: dict[str, Any] | Lost) -> str:
    kind = failure_kind(answer)
    if kind == "crash" and isinstance(answer, dict):
        return f"crash {answer['detail'].split(':')[0]}"
    return kind
