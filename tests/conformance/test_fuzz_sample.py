"""Compares a sample of random models with eager PyTorch; `scripts/fuzz_models.py` runs more."""

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_models.py"


def test_no_model_of_the_sample_differs() -> None:
    jobs = str(max(1, os.cpu_count() or 1))
    command = [sys.executable, str(_SCRIPT), "--seed", "1", "--models", "300", "--jobs", jobs, "--shrink-seconds", "20"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-20000:]
