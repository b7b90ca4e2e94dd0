"""Makes the worker of tests/unit/serving known here, for tasks that run in one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
