"""Compiles so that a process that OpenVINO's compiler ends is the last one that dies at this partition.

A marker in the journal tells the next process. It compiles the partition in a process of its own first, which shows
the signal, and whether the compiler survives without fusion; what it learns is kept for all later processes. A process
that was killed from outside leaves a marker too: then the trial survives, and the partition is compiled as always.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torchserve_openvino.backend.runtime.crashes.journal import CompileAdvice, Death, Journal, Mode, Subject
from torchserve_openvino.errors import CompileDiedError

logger = logging.getLogger(__name__)

_HOW = {"normal": "as usual", "unfused": "without fusion"}

Result = TypeVar("Result")
# Compiles in a process of its own, and returns the name of the signal that ended it; empty if it survived.
Trial = Callable[[Mode], str]

# Begins each message, by which `torchserve-openvino why` finds it in a log and in a report.
DIED = "OpenVINO's compiler died"


def survive(
    journal: Journal | None,
    describe: Callable[[], Subject],
    modes: Sequence[Mode],
    run: Callable[[Mode], Result],
    trial: Trial,
) -> tuple[Result, str]:
    """Compiles.

    Args:
        journal: Markers and verdicts; None to compile as always.
        describe: Returns what is compiled; called only with a journal, since it looks at each operator.
        modes: How it can be compiled, in the order in which they are tried; the last is ``eager``.
        run: Compiles in this process.
        trial: Compiles in another one.

    Returns:
        What ``run`` returns, and a note for the report; empty if nothing died.

    Raises:
        CompileDiedError: The compiler does not survive it.
    """
    if journal is None:
        return run(modes[0]), ""
    subject = describe()
    verdict = _verdict(journal, subject, modes, trial)
    if verdict is None:
        with journal.compiling(subject, modes[0]):
            return run(modes[0]), ""
    journal.alarmed |= bool(verdict.signal)
    if verdict.mode == "eager":
        raise CompileDiedError(f"{_how(verdict, subject)}: not compiled again {_until(verdict, journal, subject)}")
    with journal.compiling(subject, verdict.mode):
        result = run(verdict.mode)
    if verdict.mode == modes[0]:
        if verdict.deaths:
            # They were killed from outside.
            journal.settle(subject, None, [])
        return result, ""
    note = f"{_how(verdict, subject)}: compiled without fusion {_until(verdict, journal, subject)}"
    logger.warning("%s", note)
    return result, note


def _verdict(journal: Journal, subject: Subject, modes: Sequence[Mode], trial: Trial) -> CompileAdvice | None:
    """Returns how to compile, after a trial where it is needed; None if nothing speaks against compiling as always."""
    deaths, verdict = journal.deaths(subject.identity), journal.verdict(subject.identity)
    if not deaths and (verdict is not None or not journal.alarmed):
        return verdict
    with journal.lock():
        # Another worker may have found the cause meanwhile.
        deaths, verdict = journal.deaths(subject.identity), journal.verdict(subject.identity)
        if deaths:
            logger.warning(
                "%s: process %s ended while compiling %s; a separate process shows whether it was the compiler",
                DIED, " and ".join(str(death.pid) for death in deaths), subject.described,
            )  # fmt: skip
            known = verdict is not None and verdict.deaths > 0 and verdict.mode in modes
            verdict = _escalated(verdict, deaths, modes) if known and verdict is not None else None
        if verdict is None:
            verdict = _tried(journal, subject, modes, trial, deaths)
        journal.settle(subject, verdict, deaths)
    return verdict


def _escalated(before: CompileAdvice, deaths: list[Death], modes: Sequence[Mode]) -> CompileAdvice:
    """Returns what follows if processes died in spite of a verdict: what no trial shows is not repeated for ever."""
    again = [death for death in deaths if death.mode == before.mode]
    if not again or before.mode == "eager":
        # They began before the verdict.
        return before
    return CompileAdvice(modes[modes.index(before.mode) + 1], before.signal, time.time(), before.deaths + len(again))


def _tried(
    journal: Journal, subject: Subject, modes: Sequence[Mode], trial: Trial, deaths: list[Death]
) -> CompileAdvice:
    """Compiles in a process of its own, in one mode after the other."""
    verdict = CompileAdvice(modes[0], "", time.time(), len(deaths))
    if any(death.mode == "trial" for death in deaths):
        # That process only waited: it was killed from outside, perhaps because the trial takes too long.
        return verdict
    with journal.compiling(subject, "trial"):
        for mode in modes[:-1]:
            signal = trial(mode)
            if not signal:
                logger.warning("A separate process compiled %s (%s) and survived", subject.name, _HOW[mode])
                return replace(verdict, mode=mode)
            logger.warning("%s (%s) compiling %s in a separate process (%s)", DIED, signal, subject.name, _HOW[mode])
            verdict = replace(verdict, signal=verdict.signal or signal)
    return replace(verdict, mode="eager")


def _how(verdict: CompileAdvice, subject: Subject) -> str:
    cause = verdict.signal or f"{verdict.deaths} times, or was killed: for memory, by startupTimeout"
    return f"{DIED} ({cause}) compiling {subject.described}"


def _until(verdict: CompileAdvice, journal: Journal, subject: Subject) -> str:
    until = "OpenVINO, torch or the CPU changes" if verdict.signal else "a day has passed"
    return f"until {until} or {journal.verdict_file(subject.identity)} is deleted"
