"""A process that runs programs: one JSON line in, one JSON line out. What kills it kills no other program."""

import contextlib
import functools
import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    # Libraries that print must not get between the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    import torch
    import torch._dynamo.guards
    import torch._export.utils

    torch.set_num_threads(1)
    # A third of a small model's time: torch lists all its operators anew for each compilation.
    utils: Any = torch._export.utils
    utils._collect_all_valid_cia_ops_for_namespace = functools.cache(utils._collect_all_valid_cia_ops_for_namespace)
    # Dynamo times each new guard for its own logs.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    for position, line in enumerate(sys.stdin):
        task = json.loads(line)
        began = time.process_time()
        try:
            answer = answer_to(task)
        except Exception:
            answer = {"outcome": "broken", "detail": traceback.format_exc()[-2000:], "kind": "fuzzer", "step": -1}
        if position == 1:
            # What the first models brought in stays: `torch._dynamo.reset` need not go through it each time.
            torch._dynamo.reset()
            gc.freeze()
        answers.write(json.dumps({**answer, "cpu_seconds": time.process_time() - began}) + "\n")


def answer_to(task: dict[str, Any]) -> dict[str, Any]:
    """Writes or reads a program, and runs it unless only the program is asked for."""
    from fuzzing.describe import describe
    from fuzzing.generate import generate
    from fuzzing.modes import changed
    from fuzzing.mutants import MUTANTS
    from fuzzing.program import Program
    from fuzzing.run import run
    from fuzzing.script import script

    if "program" in task:
        program = Program.from_dict(task["program"])
    else:
        program = changed(generate(task["seed"], task["index"]), task.get("filters", {}))
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
    if result.outcome == "failed" or task.get("with_program"):
        answer["program"] = program.to_dict()
    return answer


if __name__ == "__main__":
    main()
