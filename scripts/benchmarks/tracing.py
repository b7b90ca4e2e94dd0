"""Times what a TorchServe worker does for one photo, with and without tracing; interleaved in one process.

    python scripts/benchmarks/tracing.py
    python scripts/benchmarks/tracing.py --runs 1000 --json tracing.json

The spans go by OTLP over HTTP to a receiver in a process of its own on this machine. Needs the extras `examples` and
`otel`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import interleave
from benchmarks.models import MODELS
from benchmarks.workers import jpeg, started

OFF, ON = "tracing: false", "tracing: true"


def _receive(exports: Queue[int]) -> None:
    """Takes exports of spans; puts the port, and the size of each export, into the queue."""

    class Receiver(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.rfile.read(size)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            exports.put(size)

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    exports.put(server.server_address[1])
    server.serve_forever()


def receiver() -> Queue[int]:
    """Starts a receiver of spans, to which OpenTelemetry's exporters of this process send, until this process ends.

    Returns:
        A queue that gets the bytes of each export.
    """
    context = multiprocessing.get_context("spawn")
    exports: Queue[int] = context.Queue()
    context.Process(target=_receive, args=(exports,), daemon=True).start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{exports.get()}"
    return exports


def main(
    runs: Annotated[int, typer.Option(help="Measured turns", min=10)] = 400,
    warmup: Annotated[int, typer.Option(help="Turns before that", min=1)] = 40,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times a handler with and without tracing."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model, body = MODELS["efficientnet-lite0"](), [{"body": jpeg()}]
    exports, calls = receiver(), {}
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder:
        with torch.inference_mode(False):
            for name, tracing in ((OFF, False), (ON, True)):
                output.progress.print(f"{model.name}, {name}: preparing")
                archive = Path(folder) / str(tracing)
                archive.mkdir()
                handler = started(model, archive, {"tracing": tracing})
                calls[name] = partial(handler.handle, body, handler.context)
        times = interleave(calls, runs, warmup)
        # The exporter sends every five seconds.
        received = exports.get(timeout=30)
    rows = [(name, f"{times.median(name):.2f}", f"{times.ratio(name, OFF):.3f}") for name in calls]
    output.results().print(output.table(f"{model.name}, f32, one photo", ("handler", "median ms", "x without"), rows))
    figures = {"runs": runs, "first_export_bytes": received, "median_ms": {name: times.median(name) for name in calls}}
    output.write_json(json_path, {**figures, "ratio": times.ratio(ON, OFF)})


if __name__ == "__main__":
    typer.run(main)
