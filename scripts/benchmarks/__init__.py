"""Benchmarks: each file is a program, what they share is in harness, output, models and workers."""

import sys
from pathlib import Path

# The folder above has programs too, and no package; what they share is in lib/.
_LIB = Path(__file__).resolve().parents[1] / "lib"
if str(_LIB) not in sys.path:
    sys.path.append(str(_LIB))
