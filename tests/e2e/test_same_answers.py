"""All workers of all registrations of a model give bitwise identical answers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torchserve_process import TorchServeProcess, handler_path, loaded

from encoder import ENCODER, encoder

# 20 takes some minutes: REGISTRATIONS=20 bash scripts/test.sh tests/e2e/test_same_answers.py
REGISTRATIONS = int(os.environ.get("REGISTRATIONS", "2"))
CONFIG = """
minWorkers: 2
maxWorkers: 2
batchSize: 4
maxBatchDelay: 1
startupTimeout: 240
pt2: {{compile: {{enable: true, backend: openvino}}}}
handler:
  openvino:
    precision: {precision}
    warmup: {{inputs: [{{name: ids, shape: [16], dtype: int64, low: 0, high: 50}}]}}
    batching: {{one_graph: {one_graph}}}
"""


@pytest.mark.parametrize(
    ("precision", "one_graph"),
    [
        ("f32", "auto"),
        ("auto", "true"),
    ],
)
@pytest.mark.slow
def test_all_registrations_answer_the_same(
    server: TorchServeProcess, tmp_path: Path, precision: str, one_graph: str
) -> None:
    torch.save(encoder().state_dict(), tmp_path / "weights.pth")
    arguments: dict[str, Any] = {
        "handler": handler_path("tensor"),
        "config": CONFIG.format(precision=precision, one_graph=one_graph),
        "model_file": ENCODER,
        "serialized_file": tmp_path / "weights.pth",
    }
    bodies = [
        json.dumps({"inputs": {"ids": [[(3 * i + j + size) % 50 for j in range(16)] for i in range(size)]}}).encode()
        for size in (1, 2, 3, 4)
    ]
    seen: list[set[str]] = [set() for _ in bodies]
    for registration in range(REGISTRATIONS):
        with loaded(server, f"same{registration}", **arguments) as name:
            for _ in range(6):
                for answers, body in zip(seen, bodies, strict=True):
                    answer = server.predict(name, body, "application/json")
                    assert answer.status_code == 200, answer.text
                    answers.add(answer.text)
    assert [len(answers) for answers in seen] == [1] * len(bodies)
