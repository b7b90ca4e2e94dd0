"""Starts the engine `compile`: compiles the graphs of a model, and proves what they generate."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import VerificationError
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.graph_calls import compile_parts
from torchserve_openvino.generation.text import compiled_steps
from torchserve_openvino.generation.text.compiled_steps import CompiledSteps, FullSequence
from torchserve_openvino.generation.text.eager import EagerSteps
from torchserve_openvino.generation.text.engine import StepLimits
from torchserve_openvino.generation.text.engine_settings import end_tokens
from torchserve_openvino.generation.text.expected import proof_prompts
from torchserve_openvino.generation.text.exporting.weights import dequantized
from torchserve_openvino.generation.text.generation_proof import GenerationProof, prove
from torchserve_openvino.generation.text.rules import Rules
from torchserve_openvino.generation.text.stepping_engine import SteppingEngine
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.report import Tracker
from torchserve_openvino.serving.loading.hub import load_config, load_model, read_config
from torchserve_openvino.serving.policy import admit
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.catalog import TASKS, loader_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """An engine that is ready, and what is known of it.

    Attributes:
        engine: To be closed by the caller.
        tracker: The records of the report.
        facts: For the report's ``generate``, JSON-safe.
    """

    engine: SteppingEngine
    tracker: Tracker
    facts: dict[str, Any]


def open_compiled(folder: Path, context: WorkerContext, prompts: list[list[int]], why: str) -> Compiled:
    """Loads a model, compiles its graphs, and compares what they generate with eager PyTorch.

    Args:
        folder: The model's Hugging Face folder.
        context: What the worker knows.
        prompts: Prompts of the proof, as tokens; made up if empty.
        why: Why this engine was chosen.

    Raises:
        ConfigError: A setting does not fit this engine, or this model.
        ModelLoadError: The model can't be loaded, or keeps something else than keys and values.
        VerificationError: It computes something else than eager PyTorch, and `verify.on_violation` is ``refuse``.
        PolicyViolationError: More falls back than `fallback` allows.
    """
    started, config = time.perf_counter(), context.config
    section = config.openvino.generate
    assert config.backend is not None
    compiled_steps.check(section, config.backend.options.device, why)
    settings = load_config(folder)
    max_length = compiled_steps.places_of(settings, section.max_length)
    model = load_model(folder, loader_of(TASKS["text_generator"], settings.to_dict())).float()
    generation = CompiledGeneration(model, compiled_steps.sizes_of(settings, section, max_length))
    count = compiled_steps.running_at_once(section, generation.bytes_of_a_sequence())
    loaded = time.perf_counter()
    # Steps of the engine are no requests, which the worker counts.
    of_engine = replace(context, config=_in_precision(config), counters=Counters())
    models = compile_parts(generation.parts(), of_engine)
    compiled_at, tracker = time.perf_counter(), models.report.tracker
    eos = end_tokens(folder)
    rules = Rules(model.generation_config, eos, encodes=generation.layout.encodes)
    for name in rules.unsupported:
        tracker.add_note(f"generation_config.json: {name} has no effect here")
    limits = StepLimits(max_length, section.max_waiting, eos, count, generation.layout.vocabulary)
    engine = SteppingEngine(CompiledSteps(generation), limits, rules)
    try:
        proof = _proven(engine, generation, config, prompts, limits)
        admit(models.report, config.openvino.fallback)
    except BaseException:
        engine.close()
        raise
    seconds = {"load": loaded - started, "prepare": compiled_at - loaded, "proof": time.perf_counter() - compiled_at}
    for name, value in seconds.items():
        tracker.add_timing(f"generate_{name}_seconds", value)
    if proof is not None:
        tracker.verify.state(proof.to_verify(), "generate")
    facts = _facts(generation, config, limits, tracker, why)
    facts["weights"] = dequantized(section.computation, scheme_of(read_config(folder)))
    facts["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
    facts |= proof.to_dict() if proof is not None else {"tokens_compared": 0, "first_difference": None, "passed": None}
    return Compiled(engine, tracker, facts)


def _in_precision(config: ServingConfig) -> ServingConfig:
    section = config.openvino
    precision = "bf16" if section.generate.weights == "bf16" else "f32"
    return config.model_copy(update={"openvino": section.model_copy(update={"precision": precision})})


def _proven(
    engine: SteppingEngine, generation: CompiledGeneration, config: ServingConfig, configured: list[list[int]],
    limits: StepLimits,
) -> GenerationProof | None:  # fmt: skip
    """Compares tokens and logits with eager PyTorch's; None where `verify.against` is ``off``."""
    section, verify = config.openvino.generate, config.openvino.verify
    if verify.against == "off":
        return None
    vocabulary = generation.layout.vocabulary
    prompts, count = proof_prompts(configured, section.proof_tokens, limits.max_length, vocabulary, limits.eos)
    references = compiled_steps.referred(EagerSteps(generation.model), prompts, count)
    logits = compiled_steps.near(CompiledSteps(generation), references)
    served: Any = FullSequence(engine, count) if generation.layout.encodes else engine
    proof = prove(served, [reference.expected for reference in references], logits, [section.computation], verify)
    if proof.passed:
        return proof
    message = f"text generation differs from eager PyTorch: {'; '.join(proof.problems)}."
    if verify.on_violation == "refuse":
        raise VerificationError(message)
    logger.warning("%s", message)
    return proof


def _facts(
    generation: CompiledGeneration, config: ServingConfig, limits: StepLimits, tracker: Tracker, why: str
) -> dict[str, Any]:
    sizes, of_one = generation.sizes, generation.bytes_of_a_sequence()
    return {
        "engine": "compile",
        "why": why,
        "compression": {},
        "kv_cache": "f32",
        "dynamic_quantization": False,
        "properties": dict(tracker.config.get("ov_config", {})),
        "operators": sum(graph.ops_total for graph in tracker.graphs),
        "operators_on_openvino": sum(graph.ops_on_openvino for graph in tracker.graphs),
        "layers": len(generation.layout.layers),
        "max_length": limits.max_length,
        "steps": [1, *sizes.steps],
        "encoder_lengths": list(sizes.texts),
        "cache_tokens": limits.running * sizes.places,
        "cache_bytes": limits.running * of_one,
        "model_from_cache": tracker.cache.traces == 0 and tracker.cache.compiles == 0,
        "proof_from_cache": False,
    }
