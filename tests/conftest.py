"""Settings of every test: torch's compiled code is forgotten between tests, seeds are fixed, no flag stays behind."""

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
    if "torch" in sys.modules:
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        assert not is_in_torch_dispatch_mode(), "this test left a flag of the process set: Dynamo skips what comes next"
