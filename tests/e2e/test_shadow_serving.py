"""`verify.shadow` in a real TorchServe: metrics, report and stored mismatches of a worker with wrong answers."""

import json
import time
from typing import Any

import pytest
import torch
from torchserve_process import TorchServeProcess, handler_path, loaded, metric

from network import NETWORK
from torchserve_openvino.serving.verification.shadow import read_mismatch

CONFIG = """
minWorkers: 1
maxWorkers: 1
startupTimeout: 120
maxRetryTimeoutInSec: 300
pt2: {{compile: {{backend: openvino, options: {{config: {{INFERENCE_PRECISION_HINT: f32}}}}}}}}
handler:
  openvino:
    warmup: {{inputs: [{{shape: [4]}}]}}
    verify: {{shadow: 1.0, shadow_budget: 1.0, on_shadow_mismatch: {action}, keep_mismatches: {folder}}}
"""

FAULTY = '''
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.tasks.tensor import TensorHandler


class Faulty(TensorHandler):
    """After READY OpenVINO is wrong for large values."""

    def initialize(self, context):
        super().initialize(context)
        right = CompiledPartition.run

        def run(partition, args):
            results = right(partition, args)
            return [each + 0.5 for each in results] if any(bool((a > 10).any()) for a in args) else results

        CompiledPartition.run = run
'''
GOOD, BAD = [[0.5, -1.0, 2.0, 0.1]], [[50.0, -1.0, 2.0, 0.1]]


def ask(server: TorchServeProcess, name: str, body: Any) -> int:
    return server.predict(name, json.dumps(body).encode(), "application/json").status_code


def eventually(read: Any, fits: Any, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not fits(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_a_fault_shows_in_metric_report_and_folder(server, network, weights, tmp_path) -> None:
    folder = tmp_path / "kept"
    config = CONFIG.format(action="warn", folder=folder)
    files = {"model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "shadowed", handler=FAULTY, config=config, **files) as name:
        assert server.describe(name)["verify"]["shadow"]["checked"] == 0
        for key in ("mismatches", "checked", "skipped"):
            eventually(lambda key=key: metric(server, f"openvino_shadow_{key}_total", name), lambda v: v == 0.0)
        for body in (GOOD, BAD, GOOD, BAD):
            assert ask(server, name, body) == 200
        report = eventually(lambda: server.describe(name), lambda r: r["verify"]["shadow"]["checked"] == 4)
        shadow = report["verify"]["shadow"]
        assert (shadow["mismatches"], shadow["kept"], shadow["skipped"]) == (2, 1, 0)
        assert shadow["worst"] == pytest.approx(0.5, rel=1e-3) and report["serving"]["policy"]["holds"]
        # The metric is sent without another request.
        eventually(lambda: metric(server, "openvino_shadow_mismatches_total", name), lambda v: v == 2.0)
        assert metric(server, "openvino_shadow_checked_total", name) == 4.0
        assert metric(server, "openvino_shadow_largest_difference", name) == pytest.approx(0.5, rel=1e-3)
    (kept,) = folder.glob("*.json")
    found = read_mismatch(kept)
    assert kept.stem in server.log_tail(400)
    assert found.args[0].tolist() == torch.tensor(BAD).tolist()
    with torch.inference_mode():
        expected = network(*found.args, **found.kwargs)
    torch.testing.assert_close(found.expected[0], expected)
    torch.testing.assert_close(found.answer[0], expected + 0.5)


@pytest.mark.slow
def test_refuse_replaces_the_worker(server, weights, tmp_path) -> None:
    config = CONFIG.format(action="refuse", folder=tmp_path / "kept")
    files = {"model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "shadow-refused", handler=FAULTY, config=config, **files) as name:
        first = server.describe(name)["pid"]
        assert ask(server, name, BAD) == 200
        eventually(lambda: metric(server, "openvino_policy_violated", name), lambda v: v == 1.0)
        eventually(lambda: ask(server, name, GOOD), lambda status: status == 200, seconds=90)
        assert server.describe(name)["pid"] != first


def test_right_answers_pass(server, weights, tmp_path) -> None:
    config = CONFIG.format(action="refuse", folder=tmp_path / "kept")
    files = {"model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "shadow-right", handler=handler_path("tensor"), config=config, **files) as name:
        for body in (GOOD, BAD) * 5:
            assert ask(server, name, body) == 200
        shadow = eventually(lambda: server.describe(name)["verify"]["shadow"], lambda s: s["checked"] >= 10)
        assert shadow["mismatches"] == 0 and list((tmp_path / "kept").iterdir()) == []
