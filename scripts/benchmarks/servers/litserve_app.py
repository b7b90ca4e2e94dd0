"""The contender LitServe with raw OpenVINO, as a program of its own.

    python scripts/benchmarks/servers/litserve_app.py --port 9000 --workers 2 --batch 1 --state FOLDER

Each worker writes a file named after its pid into FOLDER when it is ready: LitServe answers as soon as one is.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import litserve as ls  # type: ignore[import-untyped]
import numpy as np
from fastapi import Body, Response

# LitServe's workers are spawned: they import this file again, under another name.
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from benchmarks.servers.photos import LABELS  # noqa: E402

PATH = "/predict"
IR = "model.xml"


class Classifier(ls.LitAPI):
    """Photos in, ``{label: probability}`` of the five most probable classes out.

    Args:
        folder: Holds the converted model; a ready worker writes its file there.
        threads: OpenVINO's threads in each worker.
        precision: OpenVINO's `INFERENCE_PRECISION_HINT`.
        options: `max_batch_size` and `batch_timeout` of LitAPI.
    """

    def __init__(self, folder: Path, threads: int, precision: str, **options: Any) -> None:
        super().__init__(api_path=PATH, **options)
        self.folder, self.threads, self.precision = folder, threads, precision

    def setup(self, device: str) -> None:
        """Compiles one static model for each batch size, and runs each once."""
        import openvino as ov
        import torch

        from torchserve_openvino.config.sections.task_sections import ImageSection

        torch.set_num_threads(self.threads)
        self.image = ImageSection()
        self.labels = list(json.loads(LABELS.read_text(encoding="utf-8")).values())
        core = ov.Core()
        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": self.precision,
            # Every worker would pin its threads to the same first cores.
            "ENABLE_CPU_PINNING": False,
        }
        self.requests = {}
        for size in range(1, self.max_batch_size + 1):
            model = core.read_model(self.folder / IR)
            model.reshape([size, 3, self.image.crop, self.image.crop])
            self.requests[size] = core.compile_model(model, "CPU", properties).create_infer_request()
            self.infer(np.zeros((size, 3, self.image.crop, self.image.crop), np.float32))
        (self.folder / f"{os.getpid()}.worker").touch()

    def infer(self, batch: np.ndarray) -> np.ndarray:
        """Images (N, 3, H, W) to logits (N, 1000), without a copy of either."""
        return self.requests[len(batch)].infer(batch, share_inputs=True, share_outputs=True)[0]

    # A raw body of any content type; unannotated, LitServe would parse JSON. The worker decodes, not the HTTP server.
    def decode_request(self, request: Annotated[bytes, Body()]) -> np.ndarray:
        """A JPEG to the model's input."""
        from torchserve_openvino.tasks.picture_transforms import to_tensor

        return to_tensor(request, self.image).numpy()

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Called only with a batch size above 1."""
        return np.stack(inputs)

    def unbatch(self, output: list[dict[str, float]]) -> list[dict[str, float]]:
        """`predict` already returns one answer per item."""
        return output

    def predict(self, x: np.ndarray) -> Any:
        """One image, or a batch of them."""
        logits = self.infer(x if x.ndim == 4 else x[None])
        answers = [self.named(row) for row in logits]
        return answers if x.ndim == 4 else answers[0]

    def named(self, logits: np.ndarray) -> dict[str, float]:
        """The most probable classes, best first."""
        exponentials = np.exp(logits - logits.max())
        best = np.argpartition(logits, -self.image.top_k)[-self.image.top_k :]
        best = best[np.argsort(-logits[best])]
        total = exponentials.sum()
        return {self.labels[index]: float(exponentials[index] / total) for index in best}

    # The annotation tells FastAPI to build no response model.
    def encode_response(self, output: dict[str, float]) -> Response:
        """Rendered here, so that FastAPI has nothing left to encode."""
        return Response(json.dumps(output).encode(), media_type="application/json")


def convert(folder: Path) -> None:
    """Exports and converts the model, once for all workers."""
    import openvino as ov
    import torch

    from benchmarks.models import efficientnet_lite0

    model = efficientnet_lite0()
    batch = torch.export.Dim("batch", min=1, max=1024)
    example = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        exported = torch.export.export(model.module, (example,), dynamic_shapes=({0: batch},))
    ov.save_model(ov.convert_model(exported), folder / IR, compress_to_fp16=False)


def main() -> None:
    """Converts the model, and serves until terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batch-timeout", type=float, default=0.002, help="seconds; counts with --batch above 1")
    parser.add_argument("--api-servers", type=int, default=1, help="processes that speak HTTP")
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--state", type=Path, required=True)
    arguments = parser.parse_args()
    convert(arguments.state)
    timeout = arguments.batch_timeout if arguments.batch > 1 else 0.0
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.workers)
    api = Classifier(
        arguments.state, threads, arguments.precision, max_batch_size=arguments.batch, batch_timeout=timeout
    )
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=arguments.workers, timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=arguments.port,
        num_api_servers=arguments.api_servers,
        log_level="warning",
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
