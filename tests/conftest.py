"""For all tests: drops compiled code between tests, fixes seeds, and checks that no dispatch mode stays active."""

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scripts")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that the quick suite leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick suite: no slow tests, and a fixed sample of those marked `many`. A file given by name runs whole."""
    if config.getoption("--all") or any("::" in each or each.endswith(".py") for each in config.args):
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if item.get_closest_marker("slow") or not _is_drawn(item) else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _is_drawn(item: pytest.Item) -> bool:
    many = item.get_closest_marker("many")
    return many is None or zlib.crc32(item.nodeid.encode()) % many.args[0] == 0


@pytest.fixture(autouse=True, scope="session")
def quick_torch() -> None:
    """Does nothing if torch is not imported."""
    if "torch" in sys.modules:
        from isolation.quick import quicken_torch

        quicken_torch()


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """Isolates tests from each other's compiled code and random state; does nothing if torch is not imported."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch._dynamo.reset()
    yield
    if "torch" in sys.modules:
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        left = "this test left a dispatch mode active: Dynamo would not compile in later tests"
        assert not is_in_torch_dispatch_mode(), left


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """So small models are fastest in one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
