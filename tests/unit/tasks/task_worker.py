"""A worker in this process for a saved Hugging Face model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from serving_worker import Archive


class Worker:
    """A handler for a saved model, and the batches that it answers.

    Args:
        place: Where the archive is unpacked.
        kind: The handler's class.
        folder: The saved model.
        openvino: `handler.openvino` of the YAML.
        batch_size: TorchServe's batchSize.
        samples: Further files of the archive.
    """

    def __init__(
        self, place: Path, kind: Any, folder: Path, openvino: dict[str, Any], batch_size: int = 4,
        samples: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.made, self.folder = (
            Archive(place, {"handler": {"openvino": openvino}}, None, batch_size=batch_size),
            folder,
        )
        shutil.copytree(folder, place / "hub")
        for name, body in (samples or {}).items():
            (place / name).write_bytes(body)
        self.handler = kind()
        threads = torch.get_num_threads()
        try:
            self.handler.initialize(self.made.context)
        finally:
            torch.set_num_threads(threads)

    def __call__(self, *bodies: Any) -> list[Any]:
        """Returns the answers as their senders read them."""
        kind = self.made.context.get_response_content_type
        return [
            json.loads(answer) if isinstance(answer, bytes) and kind(place) == "application/json" else answer
            for place, answer in enumerate(self.made.handle(self.handler, *bodies))
        ]

    def respond(self, request: httpx.Request) -> httpx.Response:
        """Answers a request as the server would, which parses JSON."""
        assert request.url.path.startswith("/predictions/") and request.method == "POST"
        is_json = request.headers.get("content-type") == "application/json"
        answer = self.one(json.loads(request.content) if is_json else request.content)
        body = json.dumps(answer, default=lambda number: number.item())
        return httpx.Response(self.status(), content=body)

    def one(self, body: Any) -> Any:
        (answer,) = self(body)
        return answer

    def status(self, position: int = 0) -> int:
        return self.made.status(position)

    def report(self) -> dict[str, Any]:
        return self.handler.describe_handle()

    def ran_compiled(self) -> None:
        """Asserts that everything ran on OpenVINO, was verified, and was compiled before READY."""
        report = self.report()
        assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == []
        assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0

    def pipeline(self, name: str, **how: Any) -> Any:
        return transformers.pipeline(name, model=str(self.folder), device="cpu", **how)
