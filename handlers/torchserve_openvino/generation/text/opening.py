"""Opens an engine for a Hugging Face folder: from the cache or exported now, then proven."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ConfigError, VerificationError
from torchserve_openvino.generation.text.engine_settings import EngineSettings, check_device, end_tokens, properties
from torchserve_openvino.generation.text.exporting.architecture import length_within
from torchserve_openvino.generation.text.exporting.artifact import Facts
from torchserve_openvino.generation.text.genai.child_process import begun
from torchserve_openvino.generation.text.genai.genai_engine import GenAIEngine
from torchserve_openvino.generation.text.genai.pipeline import PAGE, PipelineSettings
from torchserve_openvino.generation.text.genai.prompts import EngineLimits
from torchserve_openvino.generation.text.generation_proof import AGAIN, GenerationProof, prove
from torchserve_openvino.generation.text.making import Making
from torchserve_openvino.report.progress import begin_step

logger = logging.getLogger(__name__)

_BYTES = {"f32": 4, "bf16": 2, "u8": 1}
# A scale and a zero point in float32 for each head's key and value.
_U8_EXTRA = 8
_SEQUENCES = 8
_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True)
class Opened:
    """An engine that is ready, and what is known of it.

    Attributes:
        engine: To be closed by the caller.
        facts: For the report's ``generate``, JSON-safe.
        proof: None where `verify.against` is ``off``.
    """

    engine: GenAIEngine
    facts: dict[str, Any]
    proof: GenerationProof | None


def open_engine(settings: EngineSettings, store: Store | None, making: Making | None = None) -> Opened:
    """Makes the engine `genai`, and proves it.

    Args:
        settings: What to open.
        store: The cache; None without.
        making: Of the same settings and store, if there is one.

    Raises:
        ModelLoadError: The model can't be loaded, exported or served by this engine.
        ConfigError: A setting does not fit this machine or model.
        VerificationError: It generates something else than eager PyTorch, and `verify.on_violation` is ``refuse``.
    """
    section = settings.section
    started = time.perf_counter()
    check_device(section, settings.device)
    eos = sorted(end_tokens(settings.folder))
    # It imports GenAI while the model is looked for.
    with begun() as child:
        making = making or Making(settings, store)
        with making.ready() as (folder, facts):
            length = length_within(facts.kind, facts.bounds, section.max_length)
            pages = _pages(section, facts, length)
            length = min(length, pages * PAGE - section.prompt_lookup_tokens)
            making.refer(folder, facts, length)
            prepared = time.perf_counter()
            paged = PipelineSettings(
                settings.device, properties(settings), pages, section.step_tokens, section.shares_prefixes,
                section.prompt_lookup_tokens,
            )  # fmt: skip
            begin_step("compiling the model in OpenVINO GenAI")
            link = child.load(folder, paged, eos)
    limits = EngineLimits(
        length, pages, section.max_waiting, facts.vocabulary, section.prompt_lookup_tokens, section.step_tokens
    )  # fmt: skip
    engine = GenAIEngine(link, limits)
    try:
        loaded = time.perf_counter()
        proof, compared = _proven(engine, making, settings)
    except BaseException:
        engine.close()
        raise
    seconds = {"prepare": prepared - started, "load": loaded - prepared, "proof": time.perf_counter() - loaded}
    report = _report(settings, facts, limits, making, proof, seconds)
    return Opened(engine, {**report, "tokens_compared_at_start": compared, "process": link.pid}, proof)


def _pages(section: GenerateSection, facts: Facts, length: int) -> int:
    """Returns how many pages the cache gets.

    Raises:
        ConfigError: `cache_gb` has no room for one sequence.
    """
    page = PAGE * token_bytes(section, facts)
    one = -(-(length + section.prompt_lookup_tokens) // PAGE)
    if section.cache_gb is None:
        free = int(psutil.virtual_memory().available * _SHARE_OF_MEMORY) // page
        return max(one, min(_SEQUENCES * one, free))
    pages = int(section.cache_gb * 1e9 // page)
    if pages * PAGE <= section.prompt_lookup_tokens:
        beside = f" beside {section.prompt_lookup_tokens} guesses" if section.prompt_lookup_tokens else ""
        raise ConfigError(
            f"is {section.cache_gb:g}, less than a page of {PAGE} tokens ({page / 1e9:.3g} GB){beside}; set at least "
            f"{one * page / 1e9:.3g} for one sequence of {length} tokens.",
            key="handler.openvino.generate.cache_gb",
        )
    return pages


def token_bytes(section: GenerateSection, facts: Facts) -> int:
    """Returns how much memory the keys and values of one token take, in bytes."""
    size = _BYTES[section.cached]
    extra = 2 * _U8_EXTRA if section.cached == "u8" else 0
    return sum(layer.heads * ((layer.key_features + layer.value_features) * size + extra) for layer in facts.layers)


def _proven(engine: GenAIEngine, making: Making, settings: EngineSettings) -> tuple[GenerationProof | None, int]:
    """Returns the proof, and how many tokens were compared now."""
    if making.nearness is None:
        return None, 0
    used = properties(settings)
    forms = (making.rounded_to, used["INFERENCE_PRECISION_HINT"], used["KV_CACHE_PRECISION"])
    before = making.verdict()
    expected = [one.first(AGAIN) for one in making.expected] if before is not None else making.expected
    begin_step("comparing generated tokens with eager PyTorch's")
    proof = prove(engine, expected, making.nearness, map(str, forms), settings.verify)
    if proof.passed:
        if before is None:
            making.keep(proof)
        return before or proof, proof.tokens_compared
    message = f"text generation differs from eager PyTorch: {'; '.join(proof.problems)}."
    if settings.verify.on_violation == "refuse":
        raise VerificationError(message)
    logger.warning("%s", message)
    return proof, proof.tokens_compared


def _report(
    settings: EngineSettings, facts: Facts, limits: EngineLimits, making: Making, proof: GenerationProof | None,
    seconds: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    section = settings.section
    return {
        "engine": "genai",
        "weights": making.weights,
        "compression": dict(facts.compression),
        "kv_cache": section.cached,
        "dynamic_quantization": section.dynamic_quantization,
        "prefix_caching": section.shares_prefixes,
        "prompt_lookup_tokens": section.prompt_lookup_tokens,
        "properties": {name: str(value) for name, value in properties(settings).items()},
        "operators": facts.operators,
        "operators_on_openvino": facts.operators,
        "layers": len(facts.layers),
        "max_length": limits.max_length,
        "cache_tokens": limits.pages * PAGE,
        "cache_bytes": limits.pages * PAGE * token_bytes(section, facts),
        "model_from_cache": making.model_from_cache,
        "proof_from_cache": making.proof_from_cache,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        **(proof.to_dict() if proof is not None else {"tokens_compared": 0, "first_difference": None, "passed": None}),
    }
