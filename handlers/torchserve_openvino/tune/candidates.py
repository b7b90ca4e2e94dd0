"""Configurations that may be better than the present one, and the keys by which they differ from it."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchserve_openvino.config.yaml_source import openvino_section
from torchserve_openvino.serving.threads import automatic_streams
from torchserve_openvino.tune.keys import HINT, OPENVINO, PRECISION, KeyPath, mapping, value_at
from torchserve_openvino.tune.offered_options import Option
from torchserve_openvino.tune.queueing import QueueingModel, highest_rate, interpolated, latencies
from torchserve_openvino.tune.settings import Settings


@dataclass(frozen=True, order=True)
class ComputeSettings:
    """How one worker computes: what the first stage measures in a process of its own.

    Attributes:
        precision: Of the compiled model.
        threads: Of one worker.
        streams: Inferences at once within one worker.
        options: Values of further keys that differ from the present ones.
    """

    precision: str
    threads: int
    streams: int = 1
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, order=True)
class Candidate:
    """One configuration.

    Attributes:
        engine: How each worker computes.
        workers: Worker processes.
        batch_size: ``batchSize``.
        delay_ms: ``maxBatchDelay``.
        joins: Whether requests join in the engine (``asyncCommunication``) instead of in batches.
    """

    engine: ComputeSettings
    workers: int
    batch_size: int
    delay_ms: int
    joins: bool = False

    def __str__(self) -> str:
        engine = self.engine
        streams = f", {engine.streams} streams" if engine.streams > 1 else ""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return (
            f"{workers} x {engine.threads} thread{'s' if engine.threads > 1 else ''}{streams}, {engine.precision}, "
            + ("requests join in the engine" if self.joins else f"batch {self.batch_size}, {self.delay_ms} ms")
            + "".join(f", {option}" for option in engine.options)
        )


def present_of(config: Mapping[str, Any], cores: int) -> Candidate:
    """Returns the configuration that a YAML describes.

    Args:
        config: The whole model-config.yaml.
        cores: Cores that all workers share.
    """
    workers = int(config.get("minWorkers", 1))
    section = openvino_section(config)
    threads = section.get("threads", "auto")
    execution = mapping(section.get("execution"))
    # Each worker leaves room for those that may be started later.
    most = max(workers, int(config.get("maxWorkers", workers)))
    own = max(1, cores // most) if threads == "auto" else int(threads)
    streams = 1
    if execution.get("mode") == "throughput":
        setting = execution.get("streams", "auto")
        streams = automatic_streams(own) if setting == "auto" else int(setting)
    hint = precision_of(config)
    engine = ComputeSettings(hint, own, streams)
    batch_size, delay = int(config.get("batchSize", 1)), int(config.get("maxBatchDelay", 100))
    return Candidate(engine, workers, batch_size, delay, bool(config.get("asyncCommunication", False)))


def precision_of(config: Mapping[str, Any]) -> str:
    """Returns the precision that a YAML sets, in either of its two places; f32 without one."""
    section = openvino_section(config)
    hint = value_at(config, HINT) or value_at(config, ("pt2", "options", "config", HINT[-1]))
    return str(hint or section.get("precision") or "f32")


def precision_is_pinned(config: Mapping[str, Any]) -> bool:
    """Returns True if a YAML sets the precision by OpenVINO's own property."""
    return value_at(config, HINT) is not None


def engines(
    present: Candidate, cores: int, precisions: list[str], options: tuple[Option, ...] = ()
) -> list[ComputeSettings]:
    """Returns how workers may compute: each precision with each number of threads that divides the cores.

    Args:
        present: The configuration in use; its engine is among them as it is.
        cores: That all workers share.
        precisions: To try.
        options: Values of further keys that all others have.
    """
    threads = sorted({cores, *(cores // workers for workers in worker_counts(cores)), present.engine.threads})
    pairs = [(count, 1) for count in threads] + ([(cores, min(cores, 4))] if cores > 1 and not present.joins else [])
    return sorted(
        {present.engine, *(ComputeSettings(precision, *pair, options) for precision in precisions for pair in pairs)}
    )


def worker_counts(cores: int) -> list[int]:
    """Returns the numbers of workers that divide the cores without a rest, at most 8."""
    return [count for count in range(1, min(cores, 8) + 1) if cores % count == 0]


def ranked(
    present: Candidate,
    times: Mapping[ComputeSettings, Mapping[int, float]],
    settings: Settings,
    cores: int,
    most: int,
) -> list[tuple[Candidate, float]]:
    """Returns the most promising candidates for the goal with their predicted rates, without the present one.

    Each engine is represented at least once among those that come within a third of the best, so that an error of the
    prediction, which knows neither caches nor memory bandwidth, does not exclude a kind of configuration.

    Args:
        present: The configuration in use.
        times: Milliseconds of one call by batch size, for each engine.
        settings: Limits, and what to try.
        cores: That all workers share.
        most: How many to return.
    """
    predicted: dict[Candidate, float] = {}
    # What the goal compares, higher is better.
    scores: dict[Candidate, float] = {}
    limit = settings.p99 or float("inf")
    for engine, measured in times.items():
        workers = [count for count in (settings.workers or worker_counts(cores)) if count * engine.threads <= cores]
        sizes = [size for size in measured if not settings.batch_sizes or size in settings.batch_sizes]
        if present.joins:
            # Any number of requests are in the engine at once.
            most_at_once = max((size / ms * 1e3 for size, ms in measured.items()), default=0.0)
            for count in workers:
                candidate = replace(present, engine=engine, workers=count)
                predicted[candidate] = count * most_at_once
                scores[candidate] = {
                    "latency": 1e3 / measured[min(measured)] if measured else 0.0,
                    "cost": most_at_once / engine.threads,
                }.get(settings.goal, predicted[candidate])
            continue
        for count, size, delay in itertools.product(workers, sizes, settings.delays or (1, 5, 20)):
            if size == 1 and delay != (settings.delays or [1])[0]:
                continue
            server = QueueingModel(count, size, delay, interpolated(dict(measured)))
            candidate = Candidate(engine, count, size, delay)
            predicted[candidate] = rate = highest_rate(server, limit)
            scores[candidate] = rate
            if settings.goal == "cost":
                scores[candidate] = rate / (count * engine.threads)
            elif settings.goal == "latency" and settings.rate is not None:
                times_of_requests = latencies(server, settings.rate, 3000, random.Random(0))
                scores[candidate] = 1e3 / float(np.quantile(times_of_requests, 0.99))
    predicted.pop(present, None)
    order = sorted(predicted, key=lambda candidate: -scores[candidate])
    if not order:
        return []
    chosen: list[Candidate] = []
    for candidate in order:
        kind = (candidate.engine, candidate.workers)
        near = scores[candidate] > scores[order[0]] / 1.5
        if near and kind not in {(other.engine, other.workers) for other in chosen}:
            chosen.append(candidate)
    chosen += [candidate for candidate in order if candidate not in chosen]
    return [(candidate, predicted[candidate]) for candidate in chosen[:most]]


def changes(candidate: Candidate, present: Candidate, config: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Returns the keys of the YAML that a candidate changes, with their values.

    Args:
        candidate: What is wanted.
        present: What the YAML describes; its keys are not changed where they agree.
        config: The YAML.
    """
    result: dict[KeyPath, Any] = {}
    if candidate.workers != present.workers:
        result |= {("minWorkers",): candidate.workers, ("maxWorkers",): candidate.workers}
    if candidate.batch_size != present.batch_size:
        result["batchSize",] = candidate.batch_size
    if candidate.delay_ms != present.delay_ms:
        result["maxBatchDelay",] = candidate.delay_ms
    if candidate.engine.threads != present.engine.threads or candidate.workers != present.workers:
        result[_ours("threads")] = candidate.engine.threads
    if candidate.engine.streams != present.engine.streams:
        several = candidate.engine.streams > 1
        result[_ours("execution", "mode")] = "throughput" if several else "latency"
        if several:
            result[_ours("execution", "streams")] = candidate.engine.streams
        elif value_at(config, _ours("execution", "streams")) is not None:
            # A number would be refused: several streams belong to throughput.
            result[_ours("execution", "streams")] = "auto"
    if candidate.engine.precision != present.engine.precision:
        result[HINT if precision_is_pinned(config) else PRECISION] = candidate.engine.precision
    for option in candidate.engine.options:
        result |= option.changes
    return result


def _ours(*keys: str) -> KeyPath:
    return (*OPENVINO, *keys)
