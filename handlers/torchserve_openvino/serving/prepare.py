"""From an eager model to one that is compiled for every declared shape, verified and allowed, before READY."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchserve_openvino.backend import CompiledModule, compile
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.config import ResolvedOptions, ServingConfig
from torchserve_openvino.config.sections import WarmupInput
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving import precision, verify
from torchserve_openvino.serving.admission import Admission
from torchserve_openvino.serving.counters import Counters
from torchserve_openvino.serving.input_spec import Inputs, Signature
from torchserve_openvino.serving.memory import release_weights
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.serving.shapes import shapes_of
from torchserve_openvino.serving.streams import Streams
from torchserve_openvino.serving.threads import ThreadPlan
from torchserve_openvino.serving.warmup import Case, warm_up

logger = logging.getLogger(__name__)

# Calls of each case by which precisions are compared.
TIMING_ROUNDS = 5


@dataclass
class Prepared:
    """What serves.

    Attributes:
        model: Answers requests.
        report: What ran where, and why.
        cases: What was run before READY; empty where nothing is known of the inputs.
        signatures: Compiled shapes.
        memory: Before and after the eager weights were freed; empty where they were not.
    """

    model: ServedModel
    report: CompileReport
    cases: list[Case]
    signatures: list[Signature]
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def needs_no_torch(self) -> bool:
        """Whether every declared call runs on OpenVINO alone, and without Dynamo, whose guards know torch's threads."""
        compiled, summary = self.model.compiled, self.report.summary
        covered = summary.graphs > 0 and summary.coverage == 1.0 and summary.fallbacks == 0
        frozen = isinstance(compiled, CompiledModule) and compiled.frozen >= len(self.signatures) > 0
        return covered and frozen and not any(graph["dynamic"] for graph in self.report.to_dict()["graphs"])


class Preparation:
    """Compiles a model for serving.

    Args:
        eager: The model.
        config: Its settings.
        threads: This worker's share of the cores.
        batch_size: TorchServe's batchSize.
        declared: The model's inputs, one item each; empty where they are unknown.
        samples: Calls that real requests make, from files of the archive.
        counters: What happens to requests.
        freezes: Whether calls run without guards, where the YAML says ``freeze: auto``.
        packaged: Folder of compiled graphs that came with the archive.
    """

    def __init__(
        self,
        eager: Any,
        config: ServingConfig,
        *,
        threads: ThreadPlan,
        batch_size: int,
        declared: Sequence[WarmupInput],
        samples: Sequence[tuple[str, Inputs]] = (),
        counters: Counters,
        freezes: bool = False,
        packaged: Path | None = None,
    ) -> None:
        self._eager = eager
        self._config = config
        self._section = config.openvino
        self._streams = Streams(threads.streams)
        self._threads = threads
        self._counters = counters
        self._freezes = freezes if self._section.freeze == "auto" else self._section.freeze
        self._packaged = packaged if self._section.cache.packaged else None
        self._shapes = shapes_of(
            eager, self._section, batch_size=batch_size, streams=threads.streams, declared=declared, samples=samples
        )
        self._admission = Admission(eager, self._section, self._shapes.cases)

    # --- compilation ----------------------------------------------------------------------------------------

    def run(self) -> Prepared:
        """Compiles, warms up, chooses a precision, verifies, applies the policy.

        Raises:
            VerificationError: Answers differ from eager's, and ``verify.on_violation`` is ``refuse``; or they can't be
                compared, and ``verify.required`` is true.
            PolicyViolationError: More falls back than is allowed, and ``fallback.on_violation`` is ``refuse``.
        """
        self._admission.require()
        resolved = self._with_threads()
        verifies = not self._admission.skipped
        tried = precision.candidates(resolved) if verifies else []
        if len(tried) < 2 or resolved is None:
            prepared = self._compile(resolved)
            if verifies:
                prepared = self._verified(prepared, resolved)
            else:
                self._admission.note_skipped(prepared.report, type(self._eager).__name__)
            if tried:
                prepared.report.set_config("precision_choice", {"chosen": tried[0], "tried": {}})
        else:
            prepared = self._fastest(resolved, tried)
        self._admission.check_policy(prepared.report)
        for note in self._shapes.notes:
            prepared.report.add_note(note)
        self._release(prepared)
        return prepared

    def _verified(self, prepared: Prepared, resolved: ResolvedOptions | None, name: str | None = None) -> Prepared:
        """The model once its answers were compared with eager's; a wrong one from the cache is made again."""
        result = self._admission.compare(prepared.model, prepared.report, name)
        compiled = prepared.model.compiled
        if not result["passed"] and isinstance(compiled, CompiledModule) and compiled.reject_cached():
            problem = verify.failure(result)
            logger.warning("Answers from the cache differ from eager's, compiling again: %s", problem)
            prepared = self._compile(resolved)
            prepared.report.add_note(f"entries of the cache were rejected: {problem}")
            result = self._admission.compare(prepared.model, prepared.report, name)
        elif isinstance(compiled, CompiledModule):
            compiled.confirm_cached()
        self._admission.judge(prepared.report, result)
        return prepared

    def _with_threads(self) -> ResolvedOptions | None:
        """The backend's options with this worker's share of the cores, where the user named no number."""
        resolved, added = self._config.backend, self._threads.ov_config()
        if resolved is None or not added:
            return resolved
        given = self._threads.sources
        reasons = {"NUM_STREAMS": given["streams"], "ENABLE_CPU_PINNING": "several workers share the cores"}
        sources = {f"config.{name}": reasons.get(name, given["openvino_threads"]) for name in added}
        config = {**resolved.options.config, **added}
        return replace(
            resolved,
            options=replace(resolved.options, config=config),
            sources={**resolved.sources, **sources},
        )

    def _compile(self, resolved: ResolvedOptions | None) -> Prepared:
        pt2, mode = self._config.pt2, self._section.batching.mode
        dynamic = True if mode == "dynamic" else bool(pt2.dynamic)
        compiled = compile(
            self._eager,
            dynamic=dynamic,
            options=pt2.options or None,
            fullgraph=pt2.fullgraph,
            mode=pt2.mode,
            backend=pt2.backend,
            resolved=resolved,
            own_weights=self._section.release_weights and self._freezes,
            cache=self._cache_settings(),
        )
        if self._freezes and self._shapes.cases:
            # Before the first call: what is verified is then what will be served, and it may come from the cache.
            compiled.freeze()
        only = None
        if self._shapes.sizes is None and mode != "dynamic" and not dynamic:
            only = [signature.batch for signature in self._shapes.signatures]
        served = ServedModel(
            compiled,
            self._eager,
            inputs=self._shapes.inputs,
            compiles_outside=self._section.batching.outside == "compile",
            sizes=self._shapes.sizes,
            only_sizes=only,
            facts=self._shapes.facts,
            axes=self._shapes.axes,
            streams=self._streams,
            counters=self._counters,
        )
        if self._shapes.cases:
            seconds, _ = warm_up(compiled, served, self._shapes.cases)
            compiled.report.add_timing("warmup_seconds", seconds)
        return Prepared(served, compiled.report, self._shapes.cases, self._shapes.signatures)

    def _fastest(self, resolved: ResolvedOptions, tried: Sequence[str]) -> Prepared:
        trials: list[precision.Trial] = []
        for name in tried:
            logger.info("Precision %s: compiling, verifying, timing", name)
            prepared = self._compile(precision.with_precision(resolved, name))
            _, seconds = warm_up(prepared.model.compiled, prepared.model, self._shapes.cases, rounds=TIMING_ROUNDS)
            coverage = prepared.report.summary.coverage
            result = self._admission.compare(prepared.model, prepared.report, name)
            trials.append(precision.Trial(name, seconds, result, coverage))
        chosen = precision.choose(trials)
        facts = precision.explain(trials, chosen)
        del prepared  # Dynamo keeps what it compiled as long as the model lives: only the winner may take memory.
        torch.compiler.reset()
        resolved = precision.with_precision(resolved, tried[chosen])
        winner = self._verified(self._compile(resolved), resolved, tried[chosen])
        winner.report.set_config("precision_choice", facts)
        logger.info("Precision %s is served: the fastest whose answers pass. Tried: %s", tried[chosen], facts["tried"])
        return winner

    def _cache_settings(self) -> CacheSettings:
        section = self._section.cache
        settings = CacheSettings(
            limit_bytes=int(section.limit_gb * 1e9),
            lock_seconds=float(section.wait_seconds),
            packaged=self._packaged,
            # Verification compares every compiled shape with eager; no need to do so twice.
            proves=bool(self._admission.skipped),
        )
        return settings.while_packaging(os.environ)

    def _release(self, prepared: Prepared) -> None:
        compiled = prepared.model.compiled
        if not self._section.release_weights:
            return
        if self._freezes and self._shapes.cases and isinstance(compiled, CompiledModule):
            prepared.memory = release_weights(compiled, self._shapes.cases, prepared.report)
        else:
            note = "release_weights has no effect: calls are not frozen (handler.openvino.freeze, warmup.inputs)"
            logger.warning("%s", note)
            prepared.report.add_note(note)
