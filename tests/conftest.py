"""For all tests: chooses what runs, drops compiled code, fixes seeds, and finds dispatch modes left active."""

import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from suite import durations, quick, shards

# How long an example takes says something about the machine, which other tests share.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests and their servers compile is noted in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, those marked slow and all cases too")
    parser.addoption("--fast", action="store_true", help="run only what takes half a second, without servers")
    parser.addoption("--shard", metavar="K/N", type=shards.part, help="run the Kth of N parts that take equally long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = items
    if not config.getoption("--all") and not _named(config):
        quick.check(items)
        chosen = [item for item in items if quick.runs(item)]
    if config.getoption("--fast"):
        chosen = [item for item in chosen if durations.is_short(item)]
    if (part := config.getoption("--shard")) is not None:
        chosen = shards.items_of(part, chosen)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _named(config: pytest.Config) -> bool:
    """Checks whether files are given by name: they run whole."""
    return any("::" in each or each.endswith(".py") for each in config.args)


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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handles SIGINT as Python does.

    Where tests run in several processes, or in the background, they ignore it, and so does what they start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
