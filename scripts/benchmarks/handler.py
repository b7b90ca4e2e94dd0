"""Times what a TorchServe worker does for one photo, step by step, against raw OpenVINO; interleaved in one process.

    python scripts/benchmarks/handler.py
    python scripts/benchmarks/handler.py --models resnet50 --runs 200 --json handler.json

The handler is the shipped image_classifier, initialized from an archive's folder as by TorchServe's worker. Needs the
extras `examples` and `hf`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.models import MODELS, BenchModel, raw_openvino
from benchmarks.workers import jpeg, started

RAW = "raw OpenVINO: infer()"
PHOTO_MODELS = ("efficientnet-lite0", "resnet50")


def contenders(model: BenchModel, handler: Any) -> dict[str, Call]:
    body = [{"body": jpeg()}]
    photo = handler.decode(body[0])
    batch = photo.unsqueeze(0)
    threads = handler.report.to_dict()["config"]["threads"]["openvino_threads"]
    raw, _ = raw_openvino(model, {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads})
    return {
        RAW: raw,
        "handler.model(tensor)": lambda: handler.model(batch),
        "handler.predict(photo)": lambda: handler.predict([photo]),
        "handler.decode(jpeg)": lambda: handler.decode(body[0]),
        "handler.handle(jpeg)": lambda: handler.handle(body, handler.context),
    }


def measure(calls: dict[str, Call], runs: int, warmup: int) -> list[dict[str, Any]]:
    """Medians in milliseconds, steps interleaved."""
    times = interleave(calls, runs, warmup)
    return [
        {
            "step": name,
            "median_ms": times.median(name),
            "over_raw": times.ratio(name, RAW),
            "above_raw_ms": times.above(name, RAW),
        }
        for name in calls
    ]


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    cells = [
        (row["step"], f"{row['median_ms']:.2f}", f"{row['over_raw']:.3f}", f"{row['above_raw_ms']:+.3f}")
        for row in rows
    ]
    return output.table(f"{name}, f32, one photo", ("step", "median ms", "x raw", "ms above raw"), cells)


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PHOTO_MODELS)}")] = ",".join(PHOTO_MODELS),
    runs: Annotated[int, typer.Option(help="Measured turns", min=10)] = 200,
    warmup: Annotated[int, typer.Option(help="Turns before that", min=1)] = 20,
    options: Annotated[str, typer.Option(help="handler.openvino as YAML, e.g. '{image: {fold: true}}'")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times the handler's steps on one photo."""
    warnings.filterwarnings("ignore")
    out, results = output.results(), []
    for key in output.chosen(models, PHOTO_MODELS, "--models"):
        torch.manual_seed(0)
        model = MODELS[key]()
        output.progress.print(f"{model.name}: preparing")
        with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder, torch.inference_mode(False):
            handler = started(model, Path(folder), yaml.safe_load(options))
            calls = contenders(model, handler)
            with torch.inference_mode():
                rows = measure(calls, runs, warmup)
        results.append({"model": model.name, "runs": runs, "steps": rows})
        out.print(table(model.name, rows))
    output.write_json(json_path, {"results": results})


if __name__ == "__main__":
    typer.run(main)
