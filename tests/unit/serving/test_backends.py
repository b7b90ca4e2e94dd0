"""Each backend, from the YAML to an answer."""

import logging

import pytest
import torch
from serving_worker import WARMUP, network, save_weights, sent

from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

ROWS = [[[0.5, -1.0, 2.0, 0.1]], [[1.0, 2.0, 3.0, 4.0]], [[0.0, 0.1, 0.2, 0.3]]]


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_a_worker_serves_with_every_backend(archive, tmp_path, backend, caplog) -> None:
    caplog.set_level(logging.INFO)
    options = {
        "model_caching": True,
        "cache_dir": str(tmp_path / "cache"),
        "config": {"INFERENCE_PRECISION_HINT": "f32"},
    }
    config = {"pt2": {"compile": {"enable": True, "backend": backend, "options": options}},
              "handler": {"openvino": {"warmup": WARMUP, "fallback": {"allow": [], "on_violation": "refuse"}}},
              }  # fmt: skip
    expected = network()(torch.tensor(ROWS)[:, 0]).detach()
    for start in ("cold", "warm"):
        torch.compiler.reset()
        caplog.clear()
        made = archive(config, weights=save_weights, batch_size=3)
        handler = TensorHandler()
        handler.initialize(made.context)
        for count in (3, 1):
            answers = made.handle(handler, *ROWS[:count])
            torch.testing.assert_close(torch.tensor(answers)[:, 0], expected[:count], rtol=1e-4, atol=1e-5)
        report = handler.describe_handle()
        used = report["config"]["backend"]
        assert used == backend
        assert report["summary"]["coverage"] == 1.0 and report["serving"]["compiles_after_ready"] == 0
        assert report["cache"]["traces"] == (0 if start == "warm" else 3)
        value, labels = sent(caplog, "openvino_backend")[-1]
        assert value == "1" and f"backend:{used}" in labels.split(",")
        assert f"backend {used}" in worker_of(handler).report.summary_line()
