from pathlib import Path

import pytest

from torchserve_openvino.cache.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(root)
