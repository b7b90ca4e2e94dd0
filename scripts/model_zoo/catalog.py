"""The architectures: every model type of transformers, and the families of timm and torchvision that are installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

from torchserve_openvino.errors import class_and_line

SOURCES = ("transformers", "timm", "torchvision")
# A type's first class in this order runs: the head shows what the body computes, and more.
_MAPPINGS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "CTC", "BASE", "IMAGE_TEXT_TO_TEXT",
    "DEPTH_ESTIMATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "IMAGE_CLASSIFICATION",
    "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_MATTING", "IMAGE_TO_IMAGE", "POSE_ESTIMATION", "TEXT_RECOGNITION",
    "TABLE_RECOGNITION", "AUDIO_CLASSIFICATION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "VIDEO_CLASSIFICATION",
    "MULTIMODAL_LM", "RNNT", "TDT", "BACKBONE", "PRETRAINING",
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A model to run.

    Attributes:
        source: One of `SOURCES`.
        name: Its type in transformers, or the name of a model of the family.
        class_name: Its class in transformers; empty in the others.
    """

    source: str
    name: str
    class_name: str = ""


def architectures(sources: tuple[str, ...] = SOURCES) -> tuple[list[Architecture], dict[str, str]]:
    """Lists the architectures.

    Returns:
        The architectures, and for each source that can't be used the reason.
    """
    listed: list[Architecture] = []
    reasons: dict[str, str] = {}
    for source in sources:
        try:
            listed += _LISTS[source]()
        except Exception as error:
            reasons[source] = f"{source} can't be imported: {class_and_line(error)}"
    return listed, reasons


def _of_transformers() -> list[Architecture]:
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = {}
    for kind in _MAPPINGS:
        variable = "MODEL_MAPPING_NAMES" if kind == "BASE" else f"MODEL_FOR_{kind}_MAPPING_NAMES"
        for model_type, class_name in getattr(modeling_auto, variable).items():
            names.setdefault(model_type, class_name if isinstance(class_name, str) else class_name[0])
    return [Architecture("transformers", model_type, names[model_type]) for model_type in sorted(names)]


def _of_timm() -> list[Architecture]:
    replace_torchvision()
    import timm

    families: dict[str, str] = {}
    for module in timm.list_modules():
        # The smallest of a family, by its name: names of sizes sort by length rather than by size.
        names = [name for name in timm.list_models(module=module) if not name.startswith("test_")]
        if names:
            families[module] = min(names, key=lambda name: (_size_rank(name), len(name), name))
    return [Architecture("timm", families[module]) for module in sorted(families)]


_SIZES = (
    "test",
    "femto",
    "atto",
    "pico",
    "nano",
    "zepto",
    "tiny",
    "xxs",
    "xs",
    "_s",
    "small",
    "mini",
    "18",
    "_t",
    "b0",
)


def _size_rank(name: str) -> int:
    return next((rank for rank, size in enumerate(_SIZES) if size in name), len(_SIZES))


def _of_torchvision() -> list[Architecture]:
    from torchvision import models

    return [Architecture("torchvision", name) for name in models.list_models()]


_LISTS = {"transformers": _of_transformers, "timm": _of_timm, "torchvision": _of_torchvision}


class _Replaced:
    """Finds torchvision and all its modules as mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        inside = name == "torchvision" or name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


def replace_torchvision() -> None:
    """Lets timm be imported without torchvision, which its transforms use for training and its models do not use."""
    if "torchvision" in sys.modules:
        return
    try:
        if importlib.util.find_spec("torchvision") is not None:
            import torchvision  # noqa: F401

            return
    except Exception:
        # A wheel for another build of torch: its operators are missing.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    sys.meta_path.insert(0, _Replaced())  # type: ignore[arg-type]
