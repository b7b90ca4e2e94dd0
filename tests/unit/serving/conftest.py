"""Fixtures for a worker that runs in this process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from serving_worker import archive

__all__ = ["archive"]


@pytest.fixture(autouse=True)
def nobody_states_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes thread counts from the environment, which workers would follow."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def threads_as_before():
    """Restores PyTorch's thread count: a worker changes it, and Dynamo guards on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
