"""The fixture of a worker in this process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from serving_worker import archive

__all__ = ["archive"]
