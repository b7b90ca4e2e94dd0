"""A small model and four requests for each task of Hugging Face models."""

import base64
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parent / "unit" / folder) for folder in ("serving", "tasks")]

from vision_worker import PHOTOS, encoded

from hub_audio_models import audio_model, recording
from hub_audio_models import encoded as sound
from hub_models import minilm, text_model
from hub_vision_models import vision_model
from torchserve_openvino.tasks.catalog import TASKS

# Those with answers of their own forms: test_text_generation.py and test_image_generation.py.
OTHERS = {"text_generator", "image_generator"}
SERVED = [name for name, task in TASKS.items() if task.loader and name not in OTHERS]
CLASSES = {"audio_classifier": "Wav2Vec2ForSequenceClassification", "speech_recognizer": "Wav2Vec2ForCTC"}
TEXTS = [
    "Ada Lovelace lived in London.",
    "Yes",
    "The train to Paris leaves at noon, and nobody knows why. " * 3,
    "No one",
]
LABELS = {"candidate_labels": ["travel", "sleep", "machines"]}


def saved(task: str, folder: Path) -> Path:
    if task == "sentence_embedder":
        return minilm()
    if task in CLASSES:
        return audio_model(CLASSES[task], folder)
    return vision_model(task, folder) if TASKS[task].template == "vision" else text_model(task, folder)


def bodies(task: str) -> list[Any]:
    """Four requests of different lengths or sizes."""
    if task in CLASSES:
        return [sound(recording(seconds, seed)) for seed, seconds in enumerate((0.3, 1.7, 0.9, 0.31))]
    if TASKS[task].template == "vision":
        pictures = [base64.b64encode(encoded(picture)).decode() for picture in PHOTOS]
        more = {"zero_shot_image_classifier": LABELS, "object_detector": {"threshold": 0.1}}.get(task, {})
        return [{"inputs": picture, "parameters": more} for picture in pictures]
    if task == "question_answerer":
        return [{"question": "Who?", "context": text} for text in TEXTS]
    if task == "reranker":
        return [{"query": "Where?", "texts": [text, *TEXTS[:number]]} for number, text in enumerate(TEXTS)]
    if task == "fill_mask":
        return [{"inputs": f"{text} [MASK]"} for text in TEXTS]
    return [{"inputs": text, "parameters": LABELS if task == "zero_shot_classifier" else {}} for text in TEXTS]


def close(got: Any, expected: Any, where: str = "", but: tuple[str, ...] = ()) -> None:
    """Compares answers: numbers within the tolerance of f32, everything else exactly, but for fields with such ends."""
    if isinstance(expected, dict):
        assert isinstance(got, dict) and got.keys() == expected.keys(), where
        for key in expected:
            close(got[key], expected[key], f"{where}.{key}", but)
    elif isinstance(expected, list):
        assert isinstance(got, list) and len(got) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            close(mine, theirs, f"{where}[{number}]", but)
    elif isinstance(expected, float):
        # Boxes are pixels, and equal to a tenth of one.
        assert got == pytest.approx(expected, abs=0.1 if abs(expected) > 5 else 2e-3, rel=2e-3), where
    elif not but or not where.endswith(but):
        assert got == expected, where
