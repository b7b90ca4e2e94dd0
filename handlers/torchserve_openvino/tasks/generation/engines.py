"""Starts the engine that the configuration asks for, and says how it came to be."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.open import PACKAGED_FOLDER, CacheSettings, open_cache
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import ConfigError, ModelLoadError, TorchServeOpenVINOError
from torchserve_openvino.generation.text.choosing import EngineChoice, choose, may_be_genai
from torchserve_openvino.generation.text.compiled_steps import check as check_compiled
from torchserve_openvino.generation.text.compiled_steps import places_of
from torchserve_openvino.generation.text.eager import EagerEngine
from torchserve_openvino.generation.text.engine import Engine, EngineLoad
from torchserve_openvino.generation.text.engine_settings import EngineSettings, end_tokens, properties
from torchserve_openvino.generation.text.exporting.architecture import length_of
from torchserve_openvino.generation.text.exporting.weights import dequantized
from torchserve_openvino.generation.text.making import Making
from torchserve_openvino.generation.text.opening import Opened, open_engine
from torchserve_openvino.generation.text.rules import APPLIED, UNSUPPORTED, Rules, demanded
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.report import Tracker
from torchserve_openvino.report.records import GraphRecord, PartitionRecord
from torchserve_openvino.serving.loading.hub import load_config, read_config
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.generation.compiling import open_compiled

# --- keeps a generator: an engine that dies is started again in the same worker -----------------------------------


class SupervisedEngine:
    """The engine of a worker.

    A new worker would load its libraries and its tokenizer once more, and TorchServe 0.12 can't replace a worker with
    ``asyncCommunication`` to which requests come meanwhile. So the worker lives on, and refuses requests until its
    engine runs again.

    Args:
        start: Starts an engine.
        changed: Called with the generator that was started again.

    Attributes:
        generator: The engine, and how it came to be.
    """

    def __init__(self, start: Callable[[], Generator], changed: Callable[[Generator], None]) -> None:
        self._start, self._changed = start, changed
        self._lock = threading.Lock()
        self._starting = False
        self._closing = False
        self.generator = self._begin()

    @property
    def engine(self) -> Engine:
        """The engine that runs, or ran last."""
        return self.generator.engine

    def load(self) -> EngineLoad:
        """Returns what the engine does now."""
        return self.generator.load()

    def close(self) -> None:
        """Ends all sequences, and frees the model; no other engine starts."""
        self._closing = True
        self.engine.close()

    def _begin(self) -> Generator:
        generator = self._start()
        generator.engine.when_dead(self.revive)
        return generator

    @property
    def dead(self) -> str | None:
        """Why nothing is generated; None while the engine works."""
        return self.generator.dead

    def revive(self) -> None:
        """Starts another engine if this one is dead, in a thread of its own; returns at once."""
        with self._lock:
            if self.dead is None or self._starting or self._closing:
                return
            self._starting = True
        logger.error("ERROR: the engine is dead and starts again: %s", self.dead)
        threading.Thread(target=self._run, name="text-generation-start", daemon=True).start()

    def _run(self) -> None:
        try:
            self.generator = self._begin()
            self._changed(self.generator)
            logger.info("The engine was started again: %s", self.generator.summary())
        except Exception:
            logger.exception("ERROR: the engine could not be started again; the next request tries once more")
        finally:
            self._starting = False


# --- starts the engine that the configuration asks for, and says how it came to be --------------------------------


logger = logging.getLogger(__name__)

ASYNC = "asyncCommunication"


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
    _before: EngineLoad = field(init=False)

    def __post_init__(self) -> None:
        # What the engine did for the proof is no traffic.
        self._before = self.engine.load()

    def load(self) -> EngineLoad:
        """Returns what the engine does now, and did since it serves."""
        now, before = self.engine.load(), self._before
        return replace(
            now,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            generated_tokens=now.generated_tokens - before.generated_tokens,
            prefix_hits=None if now.prefix_hits is None else now.prefix_hits - (before.prefix_hits or 0),
            guessed_tokens=now.guessed_tokens - before.guessed_tokens,
        )

    def describe(self) -> dict[str, Any]:
        """Returns the report's entry ``generate``."""
        load = self.load()
        now = {
            "running": load.running, "waiting": load.waiting, "cache_usage": round(load.cache_usage, 4),
            "prompt_tokens": load.prompt_tokens, "generated_tokens": load.generated_tokens,
            "prefix_hits": load.prefix_hits, "guessed_tokens": load.guessed_tokens,
        }  # fmt: skip
        return {**self.facts, "now": now}

    @property
    def dead(self) -> str | None:
        """Why the engine generates no more; None while it does."""
        return self.engine.dead

    def summary(self) -> str:
        """Returns what generates, on one line for the log."""
        names = ("engine", "weights", "kv_cache", "max_length", "cache_tokens", "tokens_compared", "tokens_equal")
        return "generates text: " + ", ".join(f"{name} {self.facts[name]}" for name in names if name in self.facts)


@dataclass(frozen=True)
class ConfigOnly:
    """Stands for a model that its engine loads, if it has to.

    Attributes:
        config: The model's configuration, as transformers reads it.
    """

    config: Any


@dataclass(frozen=True)
class EngineSource:
    """What an engine is started with.

    Attributes:
        folder: The model's Hugging Face folder.
        context: What the worker knows.
        tokenizer: The model's tokenizer.
    """

    folder: Path
    context: WorkerContext
    tokenizer: Any


def started(source: EngineSource, model: Any) -> Generator:
    """Starts the engine.

    Args:
        source: Folder, settings, threads.
        model: The model in eager PyTorch, for ``pt2.compile.enable: false``.

    Raises:
        ConfigError: A setting does not belong to text generation, or TorchServe can't serve it in this mode.
        ModelLoadError: The engine can't be started with this model.
        VerificationError: Its answers differ from eager PyTorch's.
    """
    context = source.context
    check(context.config, context.batch_size)
    return _on_openvino(source) if context.config.pt2.enabled else _in_eager(model, source)


def _on_openvino(source: EngineSource) -> Generator:
    config, section = source.context.config, source.context.config.openvino.generate
    if config.backend is None:
        raise ConfigError(f"is {config.pt2.backend}; text generation needs openvino.", key="pt2.compile.backend")
    prompts = [source.tokenizer(text)["input_ids"] for text in section.proof_prompts]
    try:
        making = _making(source, prompts) if may_be_genai(section) else None
        if making is not None and section.engine is None and making.stored:
            choice = EngineChoice("genai", "OpenVINO GenAI took this model before: it is in the cache")
        else:
            choice = choose(section, load_config(source.folder))
        demands = ", ".join(demanded(source.folder, APPLIED))
        if demands and making is not None and choice.engine == "genai" and section.engine is None:
            return _by_demand(source, making, prompts, demands)
        if making is not None and choice.engine == "genai":
            return _by_genai(making, choice.why)
    except ModelLoadError as error:
        if section.engine is not None or not _may_compile(config):
            raise
        choice = EngineChoice("compile", str(error))
    logger.info("generate.engine: compile, because %s", choice.why)
    opened = open_compiled(source.folder, source.context, prompts, choice.why)
    return Generator(opened.engine, opened.tracker, opened.facts)


def _by_demand(source: EngineSource, making: Making, prompts: list[list[int]], demands: str) -> Generator:
    """Starts the engine that does what generation_config.json demands, where it takes the model; else `genai`."""
    why = f"generation_config.json demands what OpenVINO GenAI does not do: {demands}"
    if _may_compile(source.context.config):
        try:
            opened = open_compiled(source.folder, source.context, prompts, why)
            return Generator(opened.engine, opened.tracker, opened.facts)
        except TorchServeOpenVINOError as error:
            why = f"{why}; but generate.engine: compile does not take the model: {error}"
    return _by_genai(making, why)


def _may_compile(config: ServingConfig) -> bool:
    """Whether the settings fit the engine `compile`, so that it may take a model that `genai` refuses."""
    assert config.backend is not None
    try:
        check_compiled(config.openvino.generate, config.backend.options.device)
    except ConfigError:
        return False
    return True


def _making(source: EngineSource, prompts: list[list[int]]) -> Making:
    config, threads = source.context.config, source.context.threads
    section, resolved = config.openvino, config.backend
    assert resolved is not None
    options = resolved.options
    settings = EngineSettings(
        source.folder, section.generate, section.verify, threads.openvino_threads or threads.cores, prompts,
        options.device, {**threads.ov_config(), **options.config},
    )  # fmt: skip
    cache = CacheSettings(
        limit_bytes=int(section.cache.limit_gb * 1e9),
        lock_seconds=float(section.cache.wait_seconds),
        packaged=source.context.model_dir / PACKAGED_FOLDER if section.cache.packaged else None,
    )
    store = open_cache(options.cache_dir if options.model_caching else None, cache.while_packaging(os.environ))
    return Making(settings, store)


def _by_genai(making: Making, why: str) -> Generator:
    settings, store = making.settings, making.store
    opened = open_engine(settings, store, making)
    tracker = Tracker()
    for name in demanded(settings.folder, (*APPLIED, *UNSUPPORTED)):
        tracker.add_note(f"generation_config.json: {name} has no effect with OpenVINO GenAI")
    _record(tracker, opened, settings.device, properties(settings))
    if store is not None:
        _record_cache(tracker, store)
    return Generator(opened.engine, tracker, {**opened.facts, "why": why})


def _record(tracker: Tracker, opened: Opened, device: str, used: Mapping[str, Any]) -> None:
    """Writes down what was exported, what runs it, and how it was compared with eager PyTorch."""
    facts, seconds = opened.facts, opened.facts["seconds"]
    tracker.config.update(
        backend="genai", effective_device=device, effective_precision=str(used["INFERENCE_PRECISION_HINT"])
    )
    for name, value in seconds.items():
        tracker.add_timing(f"generate_{name}_seconds", value)
    partition = PartitionRecord(
        "language model", facts["operators_on_openvino"], convert_seconds=seconds["prepare"],
        compile_seconds=seconds["load"], execution_devices=[device], from_cache=facts["model_from_cache"], builds=1,
    )  # fmt: skip
    tracker.add_graph(
        GraphRecord(
            "export", "torch.export of the model with its cache", "inference", facts["operators"], dynamic=True,
            partitions=[partition],
        )
    )  # fmt: skip
    tracker.cache.traces, tracker.cache.compiles = int(not facts["model_from_cache"]), 1
    proof = opened.proof
    if proof is None:
        tracker.verify.state({"skipped": "verify.against is off"})
    else:
        tracker.verify.state(proof.to_verify())


def _record_cache(tracker: Tracker, store: Store) -> None:
    record, events = tracker.cache, store.events.to_dict()
    record.enabled, record.events = True, store.events.to_dict
    record.directory, record.packaged = str(store.root if store.writable else ""), str(store.packaged or "")
    record.hits, record.misses, record.stored = (int(events.get(key, 0)) for key in ("hits", "misses", "stored"))


def _in_eager(model: Any, source: EngineSource) -> Generator:
    tracker = Tracker()
    tracker.config.update(backend="none", effective_device="CPU", effective_precision="eager")
    tracker.add_note("pt2.compile.enable is false: the model generates in eager PyTorch, one sequence after the other")
    section, eos = source.context.config.openvino.generate, end_tokens(source.folder)
    encodes = bool(getattr(model.config, "is_encoder_decoder", False))
    try:
        max_length = length_of(model.config, section.max_length)
    except ModelLoadError:
        # What OpenVINO GenAI does not compute, eager PyTorch does.
        max_length = places_of(model.config, section.max_length)
    rules = Rules(model.generation_config, eos, encodes=encodes)
    for name in rules.unsupported:
        tracker.add_note(f"generation_config.json: {name} has no effect here")
    engine = EagerEngine(model, max_length=max_length, max_waiting=section.max_waiting, eos=eos, rule=rules)
    scheme = scheme_of(read_config(source.folder))
    weights = {} if scheme is None else {"weights": dequantized("f32", scheme)}
    return Generator(engine, tracker, {"engine": "eager", **weights, "max_length": max_length})


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
        "handler.openvino.precision": (
            section.precision != "f32",
            "generate.weights is its precision, as in generate: {weights: bf16}",
        ),
        "pt2.compile.options.precision": (
            config.backend is not None and config.backend.options.precision is not None,
            "generate.weights is its precision, as in generate: {weights: bf16}",
        ),
        **(_for_exports(config) if section.generate.engine != "compile" else {}),
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
                f"is not used for text generation: requests join in the engine. Set {ASYNC}: true instead.", key=key
            )
    if keys.get(ASYNC) and batch_size > 1:
        # AsyncBatchAggregator removes from the map that it iterates over.
        raise ConfigError(
            f"is {batch_size}, but with {ASYNC}: true TorchServe 0.12 loses a worker that gets two requests at once. "
            "Set batchSize: 1: requests join in the engine.", key="batchSize",
        )  # fmt: skip


def _for_exports(config: ServingConfig) -> Mapping[str, tuple[Any, str]]:
    """Returns settings of graphs that the engine `compile` has, and an exported model does not."""
    options = config.backend.options if config.backend is not None else None
    only = "; generate.engine: compile has it"
    return {
        "handler.openvino.op_mappings": (config.openvino.op_mappings, f"the model is exported as it is{only}"),
        "pt2.compile.options.disabled_ops": (options and options.disabled_ops, f"the model runs as a whole{only}"),
        "pt2.compile.options.decompositions": (options and options.decompositions, f"the model runs as a whole{only}"),
    }
