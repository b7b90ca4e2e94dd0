"""Starts the engine that the configuration asks for, and says how it came to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.generation.text.eager import EagerEngine
from torchserve_openvino.generation.text.engine import Engine
from torchserve_openvino.report import Tracker
from torchserve_openvino.serving.threads import ThreadPlan

_ASYNC = "asyncCommunication"


@dataclass
class Generator:
    """An engine, and how it came to be.

    Attributes:
        engine: Generates tokens.
        tracker: The records of the report.
        facts: Engine, formats, limits and proof, JSON-safe.
    """

    engine: Engine
    tracker: Tracker
    facts: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Returns the report's entry ``generate``."""
        load = self.engine.load()
        now = {
            "running": load.running, "waiting": load.waiting, "cache_usage": round(load.cache_usage, 4),
            "prompt_tokens": load.prompt_tokens, "generated_tokens": load.generated_tokens,
            "prefix_hits": load.prefix_hits,
        }  # fmt: skip
        return {**self.facts, "now": now}

    def summary(self) -> str:
        """Returns one line for the log."""
        shown = ", ".join(f"{name} {value}" for name, value in self.facts.items() if not isinstance(value, dict))
        return f"text generation: {shown}"


def started(
    model: Any, folder: Path, config: ServingConfig, threads: ThreadPlan, *, batch_size: int, tokenizer: Any
) -> Generator:
    """Starts the engine.

    Args:
        model: The model in eager PyTorch.
        folder: Its Hugging Face folder.
        config: The handler's settings.
        threads: This worker's share of the cores.
        batch_size: TorchServe's batchSize.
        tokenizer: The model's tokenizer.

    Raises:
        ConfigError: A setting does not belong to text generation, or TorchServe can't serve it in this mode.
        ModelLoadError: The engine can't be started with this model.
        VerificationError: Its answers differ from eager PyTorch's.
    """
    check(config, batch_size)
    return _in_eager(model, config)


def _in_eager(model: Any, config: ServingConfig) -> Generator:
    tracker = Tracker()
    tracker.config.update(backend="none", effective_device="CPU", effective_precision="eager")
    tracker.add_note("pt2.compile.enable is false: the model generates in eager PyTorch, one sequence after the other")
    section = config.openvino.generate
    positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 4096)
    max_length = min(section.max_length or 4096, positions)
    engine = EagerEngine(model, max_length=max_length, max_waiting=section.max_waiting, eos=ends_of(model))
    return Generator(engine, tracker, {"engine": "eager", "max_length": max_length, "max_tokens": section.max_tokens})


def ends_of(model: Any) -> frozenset[int]:
    """Returns the tokens after which a model's text ends."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def check(config: ServingConfig, batch_size: int) -> None:
    """Refuses settings that mean nothing here, and modes of TorchServe that would lose requests.

    Raises:
        ConfigError: With the key, and what to do.
    """
    section, keys = config.openvino, config.torchserve
    settings: Mapping[str, tuple[Any, str]] = {
        "handler.openvino.warmup.inputs": (section.warmup.inputs, "the model's inputs are known"),
        "handler.openvino.warmup.samples": (section.warmup.samples, "generate.proof_prompts are compared before READY"),
        "handler.openvino.batching.dims": (section.batching.dims, "prompts of all lengths share each step"),
        "handler.openvino.compile": (section.compile, "the whole model runs in the engine"),
        "handler.openvino.verify.shadow": (section.verify.shadow, "answers are compared before READY only"),
        "handler.openvino.release_weights": (section.release_weights, "eager PyTorch's weights are freed in any case"),
    }
    for key, (value, why) in settings.items():
        if value:
            raise ConfigError(f"does not belong to text generation: {why}. Remove it.", key=key)
    for key in ("continuousBatching", "sequenceBatching"):
        if keys.get(key):
            raise ConfigError(
                f"is not used for text generation: requests join in the engine. Set {_ASYNC}: true instead.", key=key
            )
    if keys.get(_ASYNC) and batch_size > 1:
        # AsyncBatchAggregator removes from the map that it iterates over.
        raise ConfigError(
            f"is {batch_size}, but with {_ASYNC}: true TorchServe 0.12 loses a worker that gets two requests at once. "
            "Set batchSize: 1: requests join in the engine.", key="batchSize",
        )  # fmt: skip
