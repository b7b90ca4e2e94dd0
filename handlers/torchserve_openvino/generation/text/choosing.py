"""Chooses the engine: OpenVINO GenAI where it is installed and takes the model, else compiled graphs."""

import copy
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.text.exporting.architecture import length_of
from torchserve_openvino.generation.text.exporting.exported_language_model import unpaged


@dataclass(frozen=True)
class EngineChoice:
    """An engine.

    Attributes:
        engine: Its name.
        why: Why it was chosen.
    """

    engine: Literal["genai", "compile"]
    why: str


def choose(section: GenerateSection, config: Any) -> EngineChoice:
    """Chooses before any weight is loaded.

    Args:
        section: `handler.openvino.generate`.
        config: The model's configuration (``transformers.PreTrainedConfig``).
    """
    if section.engine is not None:
        return EngineChoice(section.engine, "generate.engine")
    if not may_be_genai(section):
        return EngineChoice("compile", "openvino-genai is not installed (pip install 'torchserve-openvino[generate]')")
    reason = _refusal(section, config)
    if reason:
        return EngineChoice("compile", reason)
    return EngineChoice("genai", f"openvino-genai is installed, and takes {config.model_type}")


def may_be_genai(section: GenerateSection) -> bool:
    """Whether the engine `genai` was asked for, or could be chosen."""
    if section.engine is not None:
        return section.engine == "genai"
    return importlib.util.find_spec("openvino_genai") is not None


def _refusal(section: GenerateSection, config: Any) -> str:
    """Returns why OpenVINO GenAI does not take a model; empty if nothing speaks against it."""
    try:
        length_of(config, section.max_length)
        # Imported here: it takes seconds, which only workers of models of transformers need.
        from transformers import AutoModelForCausalLM

        # Without weights, for the arguments of its forward and its attention.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ModelLoadError, ValueError, TypeError) as error:
        return str(error)
    return unpaged(model.config, inspect.signature(model.forward).parameters, type(model).__name__)
