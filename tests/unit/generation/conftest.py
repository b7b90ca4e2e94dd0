"""One export of each architecture for all tests of this folder: most of the time goes there."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import OFF, Nearby, begun_nearby, opened

from language_models import saved
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.generation.text import opening
from torchserve_openvino.generation.text.genai.genai_engine import GenAIEngine
from torchserve_openvino.generation.text.genai.pipeline import Pipeline, PipelineSettings
from torchserve_openvino.generation.text.genai.stepping import Stepper
from torchserve_openvino.generation.text.opening import Opened


class Served(NamedTuple):
    """A tiny model in a folder, and what was opened over it, proven."""

    folder: Path
    model: Any
    opened: Opened


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A cache that all tests of all processes share; a test of the cache itself uses its own."""
    place = tmp_path_factory.getbasetemp()
    return Store((place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "exports" / "cache")


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


@pytest.fixture(scope="session")
def llama(served: Any) -> tuple[Path, Any]:
    return served("llama")[:2]


@pytest.fixture(scope="session")
def engine(served: Any) -> GenAIEngine:
    return served("llama").opened.engine


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines that a test opens run in its own process."""
    monkeypatch.setattr("torchserve_openvino.generation.text.opening.begun", begun_nearby)


@pytest.fixture
def own(nearby: None, llama: tuple[Path, Any], exports: Store) -> Iterator[GenAIEngine]:
    found = opened(llama[0], exports, verify=OFF).engine
    yield found
    found.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each step take 20 ms at least, so that a test on a busy machine sees sequences while they run."""
    whole = Pipeline.step

    def step(pipeline: Pipeline) -> None:
        time.sleep(0.02)
        whole(pipeline)

    monkeypatch.setattr(Pipeline, "step", step)


@pytest.fixture
def stepper_of(served: Any, exports: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stepper]]:
    """Makes a stepper over the tiny Llama, with steps of 64 tokens."""
    engines = []
    folder = served("llama").folder

    def make(**section: Any) -> Stepper:
        made: list[Pipeline] = []

        class Twice(Nearby):
            def load(self, folder: Path, settings: PipelineSettings, eos: Any) -> Any:
                made.append(Pipeline(folder, settings))
                return super().load(folder, settings, eos)

        monkeypatch.setattr(opening, "begun", lambda: nullcontext(Twice()))
        engines.append(opened(folder, exports, verify=OFF, step_tokens=64, **section).engine)
        return Stepper(made[0], frozenset())

    yield make
    for engine in engines:
        engine.close()
