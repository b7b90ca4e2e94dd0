"""Models of all shipped tasks can be made part of a key: with one that can't, every start of a worker traces."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import torchserve_openvino.entrypoints
from hub_audio_models import audio_model
from hub_models import text_model
from hub_vision_models import vision_model
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.serving.loading.labels import own_classes
from torchserve_openvino.tasks.catalog import TASKS

ENTRYPOINTS = torchserve_openvino.entrypoints
TEXT = (
    "text_classifier", "token_classifier", "question_answerer", "fill_mask", "sentence_embedder",
    "zero_shot_classifier", "reranker",
)  # fmt: skip
VISION = (
    "hub_image_classifier", "image_segmenter", "object_detector", "depth_estimator", "zero_shot_image_classifier",
    "image_embedder",
)  # fmt: skip
AUDIO = {"audio_classifier": "Wav2Vec2ForSequenceClassification", "speech_recognizer": "Wav2Vec2ForCTC"}
# One folder of a model for each task with one model, by task.
FOLDERS: dict[str, Callable[[Path], Any]] = {
    **{task: partial(text_model, task) for task in TEXT},
    **{task: partial(vision_model, task) for task in VISION},
    **{task: partial(audio_model, kind) for task, kind in AUDIO.items()},
}
# They load no hub folder, or have an engine or several models, with keys of their own.
OTHERS = {"image_classifier", "tensor", "text_generator", "image_generator"}


def test_every_task_is_here() -> None:
    assert set(TASKS) == FOLDERS.keys() | OTHERS


@pytest.mark.quick(task=["sentence_embedder", "object_detector"])
@pytest.mark.parametrize("task", FOLDERS)
def test_the_model_of_a_task_is_known(task: str, tmp_path: Path) -> None:
    FOLDERS[task](tmp_path)
    modules = pkgutil.walk_packages(ENTRYPOINTS.__path__, f"{ENTRYPOINTS.__name__}.")
    name = next(each.name for each in modules if each.name.endswith(f".{task}"))
    (entry,) = own_classes(importlib.import_module(name))
    handler = entry()
    handler._openvino.model_dir = handler.folder = tmp_path
    handler.model = handler.load(tmp_path)
    assert fingerprint(handler._openvino.servable(handler.model)).unknown == ()
