"""Metrics of text generation; metrics.yaml must name them, or TorchServe drops them."""

import sys
import threading
import time
from collections.abc import Callable

from torchserve_openvino.generation.text.engine import EngineLoad
from torchserve_openvino.serving.metrics import SECONDS_BETWEEN, worker_name
from torchserve_openvino.serving.requests.metric_sink import MetricSink
from torchserve_openvino.tasks.generation.active_request import ActiveRequest

FIRST = "openvino_time_to_first_token_seconds"
BETWEEN = "openvino_time_between_tokens_seconds"
TOKENS = "openvino_tokens_total"
PREFIX = "openvino_prefix_hit_tokens_total"
GUESSED = "openvino_guessed_tokens_total"
SEQUENCES = "openvino_sequences"
CACHE = "openvino_kv_cache_ratio"


class GenerationMetrics:
    """Sends what the engine does, once a second while it does something, and how long each answer took.

    Args:
        metrics: Takes them.
        load: Returns what the engine does now.
        version: The model's version.
    """

    def __init__(self, metrics: MetricSink, load: Callable[[], EngineLoad], version: str = "") -> None:
        # Gauges of different workers must not overwrite each other.
        self._labels = {"worker": worker_name(sys.argv), "version": version or "default"}
        self._metrics, self._load = metrics, load
        self._sent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self.emit()
        # The engine is idle only some time after the last answer, when no request comes that could send that.
        threading.Thread(target=self._watch, name="text-generation-metrics", daemon=True).start()

    def on_request(self) -> None:
        """Says that a request came."""
        self._busy.set()

    def _watch(self) -> None:
        while self._busy.wait():
            self._busy.clear()
            while True:
                time.sleep(SECONDS_BETWEEN)
                load = self.emit()
                if not load.running and not load.waiting:
                    break

    def on_response(self, metrics: MetricSink, exchange: ActiveRequest) -> None:
        """Sends the times of one request's answers: to the first token, and from token to token on average.

        Args:
            metrics: Takes them.
            exchange: The request; its time begins when the worker hands it to the engine.
        """
        with self._lock:
            for choice in exchange.choices:
                if choice.first:
                    self._observe(metrics, FIRST, choice.first - choice.started)
                if choice.tokens > 1:
                    self._observe(metrics, BETWEEN, (choice.last - choice.first) / (choice.tokens - 1))

    def emit(self) -> EngineLoad:
        """Sends counts and gauges that changed; returns what the engine does now."""
        load, metrics = self._load(), self._metrics
        with self._lock:
            self._gauge(metrics, SEQUENCES, load.running, "state", "running")
            self._gauge(metrics, SEQUENCES, load.waiting, "state", "waiting")
            self._gauge(metrics, CACHE, round(load.cache_usage, 4))
            self._count(metrics, TOKENS, load.prompt_tokens, "direction", "prompt")
            self._count(metrics, TOKENS, load.generated_tokens, "direction", "generated")
            self._count(metrics, GUESSED, load.guessed_tokens)
            if load.prefix_hits is not None:
                self._count(metrics, PREFIX, load.prefix_hits)
        return load

    def _gauge(self, metrics: MetricSink, name: str, value: float, dimension: str = "", kind: str = "") -> None:
        if self._sent.get(f"{name} {kind}") != value:
            self._sent[f"{name} {kind}"] = value
            labels = {dimension: kind, **self._labels} if dimension else self._labels
            metrics.record("gauge", name, value, labels)

    def _count(self, metrics: MetricSink, name: str, total: int, dimension: str = "", kind: str = "") -> None:
        key = f"{name} {kind}"
        # An engine that was started again counts from 0.
        before = self._sent.get(key, 0)
        grown = total - (before if total >= before else 0)
        # Each counter is sent once at 0, so that monitoring sees its first increase.
        if grown > 0 or key not in self._sent:
            self._sent[key] = total
            metrics.record("counter", name, grown, {dimension: kind} if dimension else {})

    def _observe(self, metrics: MetricSink, name: str, seconds: float) -> None:
        metrics.record("histogram", name, round(seconds, 6), {}, "seconds")
