"""Makes the worker of tests/unit/serving known here, for tasks that run in one; a text generator for two files."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

if TYPE_CHECKING:
    from talker import Talker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model."""
    from chat_models import language_model

    return language_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Talker]":
    """One that generates with it."""
    from talker import Talker

    talker = Talker(tmp_path_factory.mktemp("archive") / "archive", folder)
    yield talker
    talker.close()
