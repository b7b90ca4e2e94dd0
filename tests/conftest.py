"""For all tests: chooses the quick suite, drops compiled code, fixes seeds, and finds dispatch modes left active."""

import functools
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scripts")]


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests and their servers compile is noted in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests that the quick suite leaves out")
    parser.addoption("--turn", type=int, help="which part of the files the quick suite runs; commits take turns")


# Folders of tests whose cases compile a model each. The quick suite runs one in sixteen of a test's cases, if there are
# more than two, and at least one.
_SAMPLED = ("backend", "doctor", "generation", "ops", "quantized", "serving", "tasks")
_ONE_IN, _FEW = 16, 2
# Files of these folders run in the quick suite of one commit in so many.
_TURNS = dict.fromkeys((*_SAMPLED, "cache", "conformance", "e2e", "packaging"), 3)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick suite: a part of the files."""
    return True if _quick(config) and not _has_its_turn(collection_path, _turn(config)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick suite: no slow tests, and a fixed sample of many cases. A file given by name runs whole."""
    if not _quick(config):
        return
    chosen = set(_chosen([item for item in items if item.get_closest_marker("slow") is None]))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"quick suite, --turn {_turn(config)}; --all runs all" if _quick(config) else None


def _quick(config: pytest.Config) -> bool:
    return not config.getoption("--all") and not any("::" in each or each.endswith(".py") for each in config.args)


def _turn(config: pytest.Config) -> int:
    given = config.getoption("--turn")
    return _commits() if given is None else int(given)


@functools.cache
def _commits() -> int:
    """Returns how many commits there are, 0 if Git does not say."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


def _has_its_turn(path: Path, turn: int) -> bool:
    turns = _TURNS.get(path.parent.name, 1)
    return zlib.crc32(f"{path.parent.name}/{path.name}".encode()) % turns == turn % turns


def _chosen(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields a sample of the cases of each test, at least one."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        one_in = _one_in(each)
        yield from [item for item in each if zlib.crc32(item.nodeid.encode()) % one_in == 0] or each[:1]


def _one_in(cases: list[pytest.Item]) -> int:
    many = cases[0].get_closest_marker("many")
    if many is not None:
        return int(many.args[0])
    compiles = cases[0].path.parent.name in _SAMPLED
    return _ONE_IN if compiles and len(cases) > _FEW else 1


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
