"""The fixture of a worker in this process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from serving_worker import archive

__all__ = ["archive"]


@pytest.fixture(autouse=True)
def nobody_states_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may, and workers follow that."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def threads_as_before():
    """A worker sets its process's threads, which Dynamo's guards look at; the next test finds them as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
