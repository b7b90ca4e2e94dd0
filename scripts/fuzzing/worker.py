"""A process that runs programs: one JSON line in, one JSON line out. A crash affects one program only."""

import contextlib
import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from isolation.loop import quietly, serve
from isolation.quick import quicken_torch


def main() -> None:
    answers = quietly()
    import torch

    torch.set_num_threads(1)
    quicken_torch()

    def timed(task: dict[str, Any]) -> dict[str, Any]:
        began = time.process_time()
        return {**answer_to(task), "cpu_seconds": time.process_time() - began}

    def broken(trace: str) -> dict[str, Any]:
        return {"outcome": "broken", "detail": trace[-2000:], "kind": "fuzzer", "step": -1, "cpu_seconds": 0.0}

    for answered in serve(answers, timed, broken):
        if answered == 2:
            # Objects loaded by the first models stay; frozen, `torch._dynamo.reset` need not scan them each time.
            torch._dynamo.reset()
            gc.freeze()


def answer_to(task: dict[str, Any]) -> dict[str, Any]:
    """Loads or generates a program, then returns it, describes it, writes it as a script, or runs it."""
    from fuzzing.describe import describe
    from fuzzing.modes import changed, generated
    from fuzzing.mutants import MUTANTS
    from fuzzing.program import Program
    from fuzzing.run import run
    from fuzzing.script import script

    if "program" in task:
        program = changed(Program.from_dict(task["program"]), task.get("filters", {}))
    else:
        program = generated(task["seed"], task["index"], task.get("filters", {}))
    if task.get("only_write"):
        return {"outcome": "written", "program": program.to_dict()}
    if task.get("describe"):
        return {"outcome": "described", "values": describe(program)}
    if "script" in task:
        return {"outcome": "written", "script": script(program, task["script"])}
    mutant = task.get("mutant")
    with MUTANTS[mutant].applied() if mutant else contextlib.nullcontext():
        result = run(program, task.get("strict", False))
    answer = result.to_dict()
    if result.outcome == "failed":
        answer["program"] = program.to_dict()
    return answer


if __name__ == "__main__":
    main()
