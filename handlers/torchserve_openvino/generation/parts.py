"""Compiles and verifies the graphs that a task calls by itself before READY, each as any other model."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.generation.calls import Part
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.modes import SERVING
from torchserve_openvino.serving.prepare import Preparation
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.threads import ThreadPlan

logger = logging.getLogger(__name__)


def compile_parts(
    parts: Iterable[Part], config: ServingConfig, threads: ThreadPlan, counters: Counters, model_dir: Path
) -> Models:
    """Compiles each part for its batch sizes, compares it with eager PyTorch, and lets it take the calls.

    Args:
        parts: The graphs.
        config: The model's settings.
        threads: This worker's share of the cores.
        counters: Counts what happens to requests.
        model_dir: The unpacked archive.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    models = Models(None, CompileReport(Tracker()))
    tracker = models.report.tracker
    models.parts = prepare_parts(parts, config, threads, counters, model_dir, tracker)
    if config.openvino.verify.against != "off":
        tracker.verify.state({**tracker.verify.to_dict(), "passed": tracker.verify.passed})
    return models


def prepare_parts(
    parts: Iterable[Part], config: ServingConfig, threads: ThreadPlan, counters: Counters, model_dir: Path,
    tracker: Tracker, within: str = "",
) -> dict[str, Prepared]:  # fmt: skip
    """Prepares each part as `compile_parts` does, beside other models of the same handler.

    Args:
        parts: The graphs.
        config: The model's settings.
        threads: This worker's share of the cores.
        counters: Counts what happens to requests.
        model_dir: The unpacked archive.
        tracker: Records everything for the report.
        within: What the parts belong to, for their names in the report.

    Returns:
        What was prepared, by name.

    Raises:
        VerificationError: See `Preparation.run`.
    """
    made: dict[str, Prepared] = {}
    facts: dict[str, dict[str, Any]] = {}
    for part in parts:
        name = f"{within}: {part.name}" if within else part.name
        graphs, fallbacks = list(tracker.graphs), sum(tracker.fallback_counts().values())
        preparation = Preparation(
            part.calls.graph,
            _for_part(config, part),
            threads=threads,
            batch_size=max(part.batches),
            declared=part.inputs,
            counters=counters,
            freezes=True,
            model_dir=model_dir,
            modes_for=lambda inputs: SERVING,
            part=name,
            tracker=tracker,
            shapes=part.known,
        )
        prepared = preparation.run()
        part.calls.use(part.shape, prepared.model)
        made[name] = prepared
        facts[name] = {
            **_coverage([graph for graph in tracker.graphs if not any(graph is old for old in graphs)], prepared),
            "fallbacks": sum(tracker.fallback_counts().values()) - fallbacks,
        }
        logger.info("%s is compiled: %s", name, facts[name])
    tracker.set_config("components", {**tracker.config.get("components", {}), **facts})
    return made


def _for_part(config: ServingConfig, part: Part) -> ServingConfig:
    """Returns the settings with the batch sizes of a part: it is called with these and no others."""
    section = config.openvino
    warmup = section.warmup.model_copy(update={"batch_sizes": list(part.batches)})
    batching = section.batching.model_copy(update={"mode": "exact", "outside": "refuse"})
    own = section.model_copy(update={"warmup": warmup, "batching": batching})
    return config.model_copy(update={"openvino": own})


def _coverage(graphs: list[Any], prepared: Prepared) -> dict[str, Any]:
    total = sum(graph.ops_total for graph in graphs)
    ours = sum(graph.ops_on_openvino for graph in graphs)
    return {
        "signatures": [str(signature) for signature in prepared.signatures],
        "graphs": len(graphs),
        "partitions": sum(len(graph.partitions) for graph in graphs),
        "ops_total": total,
        "ops_on_openvino": ours,
        "coverage": ours / total if total else 1.0,
    }
