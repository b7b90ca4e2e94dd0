"""`TorchServeProcess` for scripts, which run from a source tree whose package may not be installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "handlers"))

from torchserve_openvino.bench.processes import group_members, is_recorded_alive, stop_group, stop_recorded
from torchserve_openvino.bench.torchserve_process import Ports, TorchServeError, TorchServeProcess

__all__ = [
    "Ports",
    "TorchServeError",
    "TorchServeProcess",
    "group_members",
    "is_recorded_alive",
    "stop_group",
    "stop_recorded",
]
