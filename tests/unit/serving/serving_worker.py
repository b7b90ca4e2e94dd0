"""A worker in this process: real contexts, metrics and handlers, an unpacked archive on disk, no server."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ts.context import Context, RequestProcessor
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from network import NETWORK
from network import make_network as network

METRICS = Path(__file__).resolve().parents[3] / "model-config" / "metrics.yaml"

WARMUP = {"inputs": [{"shape": [4]}]}
ROWS = [[0.5, -1.0, 2.0, 0.1]]


def expected(rows: list[list[float]] = ROWS) -> torch.Tensor:
    with torch.no_grad():
        return network()(torch.tensor(rows))


def close(answer: Any, rows: list[list[float]] = ROWS) -> None:
    torch.testing.assert_close(torch.tensor(answer), expected(rows), rtol=1e-4, atol=1e-5)


class Archive:
    """An unpacked .mar.

    Args:
        folder: Where it is unpacked.
        config: Content of model-config.yaml.
        model_file: Source of the model file; None leaves it out.
        weights: Writes the serialized file to the path it gets; None leaves it out.
    """

    def __init__(self, folder: Path, config: dict[str, Any], model_file: str | None = NETWORK,
                 weights: Callable[[Path], None] | None = None, weights_name: str = "weights.pth",
                 batch_size: int = 1) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
        model: dict[str, str] = {"modelName": "net", "configFile": "model-config.yaml"}
        if model_file is not None:
            # A unique name, because Python imports each module name once.
            name = f"model_{abs(hash(str(folder)))}.py"
            (folder / name).write_text(model_file)
            model["modelFile"] = name
        if weights is not None:
            weights(folder / weights_name)
            model["serializedFile"] = weights_name
        self.metrics = MetricsCacheYamlImpl(str(METRICS))
        self.metrics.initialize_cache()
        self.metrics.model_name = "net"
        self.metrics.set_request_ids({0: "load"})
        self.manifest = {"model": model}
        self.config = config
        self.context = Context("net", str(folder), self.manifest, batch_size, None, "0.12", True, self.metrics, config)

    def handle(self, handler: Any, *bodies: Any, **headers: str) -> list[Any]:
        """Handles a batch of HTTP requests; `status` then returns their codes."""
        return self.handle_with(handler, bodies, [{"explain": "False", **headers} for _ in bodies])

    def handle_with(self, handler: Any, bodies: Sequence[Any], headers: Sequence[dict[str, Any]]) -> list[Any]:
        """Handles a batch of requests, each with its own headers; TorchServe sets `explain` only for HTTP requests."""
        return self.handle_rows(handler, [{"body": body} for body in bodies], headers)

    def handle_rows(self, handler: Any, rows: Sequence[dict[str, Any]], headers: Sequence[dict[str, Any]]) -> list[Any]:
        """Handles a batch of requests as TorchServe passes them: forms have a row with their fields."""
        self.context.request_processor = [RequestProcessor(dict(each)) for each in headers]
        ids = {i: f"request-{i}" for i in range(len(rows))}
        self.context.request_ids = ids
        self.metrics.set_request_ids(ids)
        return handler.handle(list(rows), self.context)

    def status(self, position: int) -> int:
        return self.context.get_response_status(position)[0]


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Callable[..., Archive]:
    """Makes an unpacked archive whose folder is importable, as TorchServe does."""

    def make(config: dict[str, Any] | None = None, **arguments: Any) -> Archive:
        folder = tmp_path / f"archive{len(list(tmp_path.iterdir()))}"
        made = Archive(
            folder, config if config is not None else {"handler": {"openvino": {"warmup": WARMUP}}}, **arguments
        )
        monkeypatch.syspath_prepend(str(folder))
        return made

    return make


def sent(caplog: pytest.LogCaptureFixture, name: str) -> list[tuple[str, str]]:
    """Returns value and labels for each time that the metric was sent; TorchServe logs metrics at level INFO."""
    found = [re.match(rf"\[METRICS\]{name}\.\w+:([^|]+)\|#([^|]*)\|", r.getMessage()) for r in caplog.records]
    return [(match[1], match[2]) for match in found if match]


def save_weights(path: Path) -> None:
    torch.save(network().state_dict(), path)


def labels(folder: Path, names: dict[str, str]) -> None:
    (folder / "index_to_name.json").write_text(json.dumps(names))
