"""What an engine is made of: a folder, settings, and what follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchserve_openvino.backend.runtime.build import device_capabilities
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.files.json_text import JsonError, read_json_object


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made of.

    Attributes:
        folder: What `save_pretrained` wrote.
        section: `handler.openvino.generate`.
        verify: `handler.openvino.verify`.
        threads: CPU threads of the engine.
        prompts: Prompts of the proof, as tokens; made up if empty.
        device: OpenVINO device; only ``CPU`` is supported.
        config: Further OpenVINO properties, which win over those of `section`.
    """

    folder: Path
    section: GenerateSection
    verify: VerifySection
    threads: int
    prompts: Sequence[Sequence[int]] = ()
    device: str = "CPU"
    config: Mapping[str, Any] | None = None


def check_device(section: GenerateSection, device: str) -> None:
    """Raises ConfigError for another device than the CPU, or a precision that it would silently replace by another."""
    if device != "CPU":
        raise ConfigError(
            f"is {device}; text generation is tested on CPU only, whose cache has pages of another size. Set CPU.",
            key="pt2.compile.options.device",
        )
    if section.computation == "bf16" and "BF16" not in device_capabilities(device):
        raise ConfigError(
            f"is bf16, which {device} on this machine does not support; set f32.",
            key="handler.openvino.generate.weights",
        )


def properties(settings: EngineSettings) -> dict[str, Any]:
    """Returns the properties that the model is compiled with. Nothing is left to OpenVINO's choice of precision."""
    section = settings.section
    values: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": section.computation,
        "KV_CACHE_PRECISION": section.cached,
        "INFERENCE_NUM_THREADS": settings.threads,
    }
    if not section.dynamic_quantization:
        values["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    return values | dict(settings.config or {})


def end_tokens(folder: Path) -> frozenset[int]:
    """Returns the tokens that end a sequence: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            value = read_json_object(path).get("eos_token_id") if path.is_file() else None
        except (OSError, JsonError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}.") from error
        if value is not None:
            tokens = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in tokens):
                raise ModelLoadError(
                    f"{path}: eos_token_id is {value!r:.100}, not a number of a token or a list of them."
                )
            return frozenset(tokens)
    return frozenset()
