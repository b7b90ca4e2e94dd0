"""Makes the worker of tests/unit/serving known here, for tasks that run in one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share its workers, which take seconds to start, so they run in one process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
