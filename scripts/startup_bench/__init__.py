"""What scripts/benchmark_startup.py is made of: the contenders' program, rounds, servers and tables."""

import sys
from pathlib import Path

# Shared with the other scripts, which are programs and not a package.
_SCRIPTS = Path(__file__).resolve().parents[1]
for _folder in (_SCRIPTS, _SCRIPTS / "lib"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
