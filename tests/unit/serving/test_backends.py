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


@pytest.mark.parametrize(("stated", "passed"), [(None, None), (False, False), (True, True)])
def test_dynamic_is_passed_to_other_backends_as_stated(archive, monkeypatch, stated, passed) -> None:
    seen = []
    compile_ = torch.compile

    def compiled(model, **how):
        if how.get("backend") == "aot_eager":
            seen.append(how["dynamic"])
        return compile_(model, **how)

    monkeypatch.setattr(torch, "compile", compiled)
    pt2 = {"backend": "aot_eager", **({"dynamic": stated} if stated is not None else {})}
    made = archive({"pt2": {"compile": pt2}, "handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    assert seen == [passed]


def test_beyond_max_shapes_the_same_backend_serves(archive) -> None:
    section = {"batching": {"max_shapes": 1}}
    pt2 = {"compile": {"backend": "aot_eager"}}
    made = archive({"pt2": pt2, "handler": {"openvino": section}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    for rows in (1, 2, 3, 5):
        answer = made.handle(handler, [[0.5, -1.0, 2.0, 0.1]] * rows)
        assert made.status(0) == 200 and len(answer[0]) == rows
    report = handler.describe_handle()
    assert report["config"]["backend"] == "aot_eager" and report["summary"]["ops_on_openvino"] == 0
