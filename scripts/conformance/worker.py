"""A process that runs cases: one JSON line in, one JSON line out. What kills it kills no other case."""

import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    # Libraries that print must not get between the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    import torch

    torch.set_num_threads(1)
    from conformance import tasks

    for line in sys.stdin:
        task = json.loads(line)
        try:
            outcome = tasks.run(task)
            answer = {"outcome": outcome.name, "reasons": list(outcome.reasons)}
        except Exception:
            answer = {"outcome": "CRASH", "reasons": [traceback.format_exc().strip().splitlines()[-1]]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
