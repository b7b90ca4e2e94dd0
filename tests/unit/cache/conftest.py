import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchserve_openvino.cache.storage.store import Store

NAMES = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports source text as a new module, as a worker does after unpacking an archive."""
    made: list[str] = []

    def load(text: str, name: str = "", folder: str = "") -> types.ModuleType:
        name = name or f"user_model_{next(NAMES)}"
        path = tmp_path / (folder or name) / f"{name.rpartition('.')[2]}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> Store:
    return Store(root)
