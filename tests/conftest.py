"""Settings of every test: torch's compiled code is forgotten between tests, seeds are fixed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """No test sees another's compiled code or random state. Costs nothing where torch was never imported."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch._dynamo.reset()
    yield
