"""Benchmarks: each file is a program; harness, output, models and workers hold the shared code."""

import sys
from pathlib import Path

# The programs in scripts/ are not a package; their shared code is in lib/.
_LIB = Path(__file__).resolve().parents[1] / "lib"
if str(_LIB) not in sys.path:
    sys.path.append(str(_LIB))
