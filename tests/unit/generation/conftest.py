"""One export of each architecture for all tests of this folder: most of the time goes there."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import opened

from language_models import saved
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.generation.text.opening import Opened


class Served(NamedTuple):
    """A tiny model in a folder, and what was opened over it, proven."""

    folder: Path
    model: Any
    opened: Opened


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A cache that all tests share; a test of the cache itself uses its own."""
    return Store(tmp_path_factory.mktemp("exports") / "cache")


@pytest.fixture
def filled(served: Callable[[str], Served], exports: Store, tmp_path: Path) -> Store:
    """A cache of the test's own that holds the tiny Llama, and its proof."""
    served("llama")
    shutil.copytree(exports.root, tmp_path / "cache")
    return Store(tmp_path / "cache")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, exports: Store) -> Iterator[Callable[[str], Served]]:
    """Opens a tiny model of an architecture, once; the engine is shared."""
    made: dict[str, Served] = {}

    def serve(kind: str) -> Served:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = saved(folder, kind)
            made[kind] = Served(folder, model, opened(folder, exports))
        return made[kind]

    yield serve
    for one in made.values():
        one.opened.engine.close()
