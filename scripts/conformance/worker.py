"""A process that runs cases: one JSON line in, one JSON line out. A crash affects one case only."""

import sys
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
    from conformance import tasks

    def answer_to(task: dict[str, Any]) -> dict[str, Any]:
        outcome = tasks.run(task)
        return {"outcome": outcome.name, "reasons": list(outcome.reasons)}

    def broken(trace: str) -> dict[str, Any]:
        return {"outcome": "CRASH", "reasons": [trace.strip().splitlines()[-1]]}

    for _ in serve(answers, answer_to, broken):
        pass


if __name__ == "__main__":
    main()
