"""A process that runs cases: one JSON line in, one JSON line out. A crash affects one case only."""

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
    from model_zoo.catalog import Architecture
    from model_zoo.grid import Case
    from model_zoo.outcome import Outcome
    from model_zoo.running import run

    def answer_to(task: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        cases = [Case(**case) for case in task["cases"]]
        outcome = run(Architecture(**task["architecture"]), cases, task["number"], task["properties"])
        outcome.seconds = time.perf_counter() - began
        return outcome.to_dict()

    def broken(trace: str) -> dict[str, Any]:
        return Outcome("ERROR", f"the script itself: {' '.join(trace.split())[-600:]}").to_dict()

    for _ in serve(answers, answer_to, broken):
        gc.collect()


if __name__ == "__main__":
    main()
