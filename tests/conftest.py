"""Settings of every test: torch's compiled code is forgotten between tests, seeds are fixed, no flag stays behind."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def quick_torch() -> None:
    """A third of a small model's first call is two things that torch does anew each time, and that change nothing."""
    if "torch" in sys.modules:
        import torch._dynamo.guards
        import torch._export.utils

        # Dynamo times each new guard for its own logs.
        guards: Any = torch._dynamo.guards
        guards.profile_guard_manager = lambda *_: 0.0
        # torch.export lists all operators that there are.
        utils: Any = torch._export.utils
        utils._collect_all_valid_cia_ops_for_namespace = functools.cache(utils._collect_all_valid_cia_ops_for_namespace)


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
