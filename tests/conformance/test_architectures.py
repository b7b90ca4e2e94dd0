"""Compares small published architectures with eager PyTorch; `scripts/architectures.py` runs all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_zoo.sample import NAMES

pytest.importorskip("transformers")
_SCRIPT = Path(__file__).parents[2] / "scripts" / "architectures.py"


# The first case of each: heads of 128, static shapes, padded on the left; of these, which differ most in what they do
# with sizes, masks and caches, the second, too: bf16, open lengths.
_TWICE = ("llama", "bert", "whisper", "swin", "wav2vec2")


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        pytest.param(_TWICE, 2, id="twice"),
        pytest.param(tuple(name for name in NAMES if name not in _TWICE), 1, id="once"),
        *(pytest.param((name,), -1, id=name, marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_no_architecture_of_the_sample_differs(names: tuple[str, ...], cases: int) -> None:
    # A case takes a minute of processor time, and shares the cores with other tests.
    command = [
        sys.executable,
        str(_SCRIPT),
        "--sample",
        "--only",
        ",".join(names),
        "--cases",
        str(cases),
        "--json",
        "--limit",
        "300",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=3600)
    assert done.returncode == 0, done.stderr[-20000:]
    verdicts = {entry["name"]: entry["verdict"] for entry in json.loads(done.stdout)["architectures"]}
    assert verdicts == dict.fromkeys(names, "right")
