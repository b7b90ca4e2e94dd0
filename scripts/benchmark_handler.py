"""Times what a TorchServe worker does for one photo, step by step, next to raw OpenVINO; in one process, in turns.

    python scripts/benchmark_handler.py
    python scripts/benchmark_handler.py --models resnet50 --runs 200 --json handler.json

The handler is the shipped image_classifier, initialized from an archive's folder as TorchServe's worker does it. Needs
the extras `examples` and `hf`.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from bench_models import MODELS, BenchModel

Call = Callable[[], Any]
console = Console(stderr=True)
RAW = "raw OpenVINO: infer()"
PHOTO_MODELS = ("efficientnet-lite0", "resnet50")


def context_for(folder: Path, settings: dict[str, Any]) -> Any:
    """The context that TorchServe gives a worker for an unpacked archive with this model-config.yaml."""
    from ts.context import Context, RequestProcessor
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    (folder / "model-config.yaml").write_text(yaml.safe_dump(settings))
    manifest = {"model": {"modelName": "bench", "modelFile": "model.py", "configFile": "model-config.yaml"}}
    metrics_file = Path(__file__).resolve().parents[1] / "model-config" / "metrics.yaml"
    metrics = MetricsCacheYamlImpl(str(metrics_file))
    metrics.initialize_cache()
    metrics.model_name = "bench"
    metrics.set_request_ids({0: "load"})
    context = Context(
        "bench", str(folder), manifest, settings.get("batchSize", 1), None, "0.12", True, metrics, settings
    )
    context.request_processor, context.request_ids = [RequestProcessor({})], {0: "request"}
    return context


def started(model: BenchModel, folder: Path, options: dict[str, Any]) -> Any:
    """The shipped handler, initialized on an unpacked archive, with the context that a worker gives it."""
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


def raw(model: BenchModel, threads: int) -> Call:
    """The least that an OpenVINO program can do for one input: no copy of inputs or outputs."""
    import openvino as ov

    exported = torch.export.export(model.module, (), model.kwargs)
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = ov.Core().compile_model(ov.convert_model(exported), "CPU", config)
    request = compiled.create_infer_request()
    inputs = [tensor.numpy() for tensor in model.kwargs.values()]
    return lambda: request.infer(inputs, share_inputs=True, share_outputs=True)


def jpeg() -> bytes:
    """scikit-image's cat, as it would be sent."""
    from PIL import Image
    from skimage import data

    buffer = io.BytesIO()
    Image.fromarray(data.chelsea()).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def contenders(model: BenchModel, handler: Any) -> dict[str, Call]:
    body = [{"body": jpeg()}]
    photo = handler.decode(body[0])
    batch = photo.unsqueeze(0)
    return {
        RAW: raw(model, handler.report.to_dict()["config"]["threads"]["openvino_threads"]),
        "handler.model(tensor)": lambda: handler.model(batch),
        "handler.predict(photo)": lambda: handler.predict([photo]),
        "handler.decode(jpeg)": lambda: handler.decode(body[0]),
        "handler.handle(jpeg)": lambda: handler.handle(body, handler.context),
    }


def measure(calls: dict[str, Call], runs: int, warmup: int) -> list[dict[str, Any]]:
    """Medians in milliseconds, contenders taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(warmup + runs):
        # Whoever follows the same neighbour each time would inherit its caches each time.
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            if turn >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    rows = []
    for name, values in times.items():
        pairs = list(zip(values, times[RAW], strict=True))
        rows.append(
            {
                "step": name,
                "median_ms": statistics.median(values),
                "over_raw": statistics.median(a / b for a, b in pairs),
                "above_raw_ms": statistics.median(a - b for a, b in pairs),
            }
        )
    return rows


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    result = Table(title=f"{name}, f32, one photo")
    for column in ("step", "median ms", "x raw", "ms above raw"):
        result.add_column(column, justify="left" if column == "step" else "right")
    for row in rows:
        result.add_row(
            row["step"], f"{row['median_ms']:.2f}", f"{row['over_raw']:.3f}", f"{row['above_raw_ms']:+.3f}"
        )  # fmt: skip
    return result


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PHOTO_MODELS)}")] = ",".join(PHOTO_MODELS),
    runs: Annotated[int, typer.Option(help="Counted rounds", min=10)] = 200,
    warmup: Annotated[int, typer.Option(help="Rounds before that", min=1)] = 20,
    options: Annotated[str, typer.Option(help="handler.openvino as YAML, e.g. '{image: {fold: true}}'")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times the handler's steps on one photo."""
    from torchserve_openvino.report.environment import environment

    warnings.filterwarnings("ignore")
    out = Console() if sys.stdout.isatty() else Console(width=120)
    results = []
    for name in models.split(","):
        torch.manual_seed(0)
        model = MODELS[name]()
        console.print(f"{model.name}: preparing", highlight=False)
        with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder, torch.inference_mode(False):
            handler = started(model, Path(folder), yaml.safe_load(options))
            calls = contenders(model, handler)
            with torch.inference_mode():
                rows = measure(calls, runs, warmup)
        results.append({"model": model.name, "runs": runs, "steps": rows})
        out.print(table(model.name, rows))
    if json_path is not None:
        json_path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2))
        console.print(f"wrote {json_path}")


if __name__ == "__main__":
    typer.run(main)
