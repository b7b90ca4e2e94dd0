"""A TorchServe worker's handler in this process: the shipped image_classifier on an unpacked archive, and a photo."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.models import BenchModel


def context_for(folder: Path, settings: dict[str, Any]) -> Any:
    """The context that TorchServe gives a worker for an unpacked archive with this model-config.yaml."""
    from ts.context import Context
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    (folder / "model-config.yaml").write_text(yaml.safe_dump(settings))
    manifest = {"model": {"modelName": "bench", "modelFile": "model.py", "configFile": "model-config.yaml"}}
    metrics_file = Path(__file__).resolve().parents[2] / "model-config" / "metrics.yaml"
    metrics = MetricsCacheYamlImpl(str(metrics_file))
    metrics.initialize_cache()
    metrics.model_name = "bench"
    metrics.set_request_ids({0: "load"})
    context = Context(
        "bench", str(folder), manifest, settings.get("batchSize", 1), None, "0.12", True, metrics, settings
    )
    expect(context, 1)
    return context


def expect(context: Any, requests: int) -> None:
    """Makes the context that of a batch of requests."""
    from ts.context import RequestProcessor

    context.request_processor = [RequestProcessor({}) for _ in range(requests)]
    context.request_ids = {index: f"request {index}" for index in range(requests)}


def own_threads() -> Callable[[], None]:
    """Returns what gives torch the threads that it has now, which the handler that was started last has chosen.

    In a worker of its own it would keep them; in one process the next handler's choice holds for all.
    """
    threads = torch.get_num_threads()

    def switch() -> None:
        torch.set_num_threads(threads)
        # The threads of a new count are made by the first operator that needs them.
        torch.ones(1 << 18).sin()

    return switch


def started(model: BenchModel, folder: Path, options: dict[str, Any]) -> Any:
    """The handler image_classifier, initialized on an unpacked archive.

    Args:
        model: What it serves.
        folder: An empty folder for the archive.
        options: `handler.openvino` of its YAML.
    """
    from torchserve_openvino.entrypoints.image_classifier import OpenVINOImageClassifier

    class Entry(OpenVINOImageClassifier):
        def _load_pickled_model(self, *_: Any) -> torch.nn.Module:
            return model.module

    settings = {
        "pt2": {"compile": {"backend": "openvino", "options": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}},
        "handler": {"openvino": options},
    }
    context = context_for(folder, settings)
    handler = Entry()
    handler.initialize(context)
    handler.context = context
    return handler


def jpeg() -> bytes:
    """scikit-image's cat, as a client sends it."""
    from PIL import Image
    from skimage import data

    buffer = io.BytesIO()
    Image.fromarray(data.chelsea()).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
