"""Fixtures for a worker that runs in this process."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from serving_worker import archive

__all__ = ["archive"]


@pytest.fixture(autouse=True)
def no_thread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes thread counts from the environment, which workers would follow; restores it afterwards."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # Deleting an unset variable would record nothing to restore, and workers set these variables.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def threads_as_before():
    """Restores PyTorch's thread count: a worker changes it, and Dynamo guards on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The worker's end of a connection and the frontend's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs
