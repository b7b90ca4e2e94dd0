"""Configurations that may be better than the present one, and the keys by which they differ from it."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.config.yaml_source import openvino_section
from torchserve_openvino.tune.queueing import Server, highest_rate, interpolated
from torchserve_openvino.tune.settings import Settings

KeyPath = tuple[str, ...]
OPENVINO: KeyPath = ("handler", "openvino")
HINT: KeyPath = ("pt2", "compile", "options", "config", "INFERENCE_PRECISION_HINT")
PRECISION: KeyPath = (*OPENVINO, "precision")


@dataclass(frozen=True, order=True)
class Engine:
    """How one worker computes: what the first stage measures in a process of its own.

    Attributes:
        precision: Of the compiled model.
        threads: Of one worker.
        streams: Inferences at once within one worker.
    """

    precision: str
    threads: int
    streams: int = 1


@dataclass(frozen=True, order=True)
class Candidate:
    """One configuration.

    Attributes:
        engine: How each worker computes.
        workers: Worker processes.
        batch_size: ``batchSize``.
        delay_ms: ``maxBatchDelay``.
    """

    engine: Engine
    workers: int
    batch_size: int
    delay_ms: int

    def __str__(self) -> str:
        engine = self.engine
        streams = f", {engine.streams} streams" if engine.streams > 1 else ""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return (
            f"{workers} x {engine.threads} thread{'s' if engine.threads > 1 else ''}{streams}, {engine.precision}, "
            f"batch {self.batch_size}, {self.delay_ms} ms"
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
    execution = _mapping(section.get("execution"))
    own = max(1, cores // workers) if threads == "auto" else int(threads)
    streams = 1
    if execution.get("mode") == "throughput":
        setting = execution.get("streams", "auto")
        streams = min(own, 4) if setting == "auto" else int(setting)
    hint = precision_of(config)
    engine = Engine(hint, own, streams)
    return Candidate(engine, workers, int(config.get("batchSize", 1)), int(config.get("maxBatchDelay", 100)))


def precision_of(config: Mapping[str, Any]) -> str:
    """Returns the precision that a YAML sets, in either of its two places; f32 without one."""
    section = openvino_section(config)
    hint = _get(config, HINT) or _get(config, ("pt2", "options", "config", HINT[-1]))
    return str(hint or section.get("precision") or "f32")


def precision_is_pinned(config: Mapping[str, Any]) -> bool:
    """Returns True if a YAML sets the precision by OpenVINO's own property."""
    return _get(config, HINT) is not None


def engines(present: Candidate, cores: int, precisions: list[str]) -> list[Engine]:
    """Returns how workers may compute: each precision with each number of threads that divides the cores."""
    threads = sorted({cores, *(cores // workers for workers in worker_counts(cores)), present.engine.threads})
    result = {present.engine, *(Engine(precision, count) for precision in precisions for count in threads)}
    if cores > 1:
        result |= {Engine(precision, cores, min(cores, 4)) for precision in precisions}
    return sorted(result)


def worker_counts(cores: int) -> list[int]:
    """Returns the numbers of workers that divide the cores without a rest, at most 8."""
    return [count for count in range(1, min(cores, 8) + 1) if cores % count == 0]


def ranked(
    present: Candidate,
    times: Mapping[Engine, Mapping[int, float]],
    settings: Settings,
    cores: int,
    most: int,
) -> list[tuple[Candidate, float]]:
    """Returns the most promising candidates with their predicted rates, without the present one.

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
    limit = settings.p99 or float("inf")
    for engine, measured in times.items():
        workers = [count for count in (settings.workers or worker_counts(cores)) if count * engine.threads <= cores]
        sizes = [size for size in measured if not settings.batch_sizes or size in settings.batch_sizes]
        for count, size, delay in itertools.product(workers, sizes, settings.delays or (1, 5, 20)):
            if size == 1 and delay != (settings.delays or [1])[0]:
                continue
            server = Server(count, size, delay, interpolated(dict(measured)))
            predicted[Candidate(engine, count, size, delay)] = highest_rate(server, limit)
    predicted.pop(present, None)
    order = sorted(predicted, key=lambda each: -predicted[each])
    if not order:
        return []
    chosen: list[Candidate] = []
    for candidate in order:
        kind = (candidate.engine, candidate.workers)
        near = predicted[candidate] > predicted[order[0]] / 1.5
        if near and kind not in {(each.engine, each.workers) for each in chosen}:
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
    if candidate.engine.precision != present.engine.precision:
        result[HINT if precision_is_pinned(config) else PRECISION] = candidate.engine.precision
    return result


def _ours(*keys: str) -> KeyPath:
    return (*OPENVINO, *keys)


def with_changes(config: Mapping[str, Any], changed: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration with some keys set."""
    result: dict[str, Any] = dict(config)
    for path, value in changed.items():
        level = result
        for key in path[:-1]:
            level[key] = dict(_mapping(level.get(key)))
            level = level[key]
        level[path[-1]] = value
    return result


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _get(config: Mapping[str, Any], path: KeyPath) -> Any:
    level: Any = config
    for key in path:
        level = _mapping(level).get(key)
    return level
