"""Phases, batches and request ids of a real TorchServe: in its metrics, in the report, in its log."""

import re
import time

import httpx
from torchserve_process import TorchServeProcess, handler_path, loaded, metric

from network import NETWORK

CONFIG = """
batchSize: 2
maxBatchDelay: 20
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler: {openvino: {warmup: {inputs: [{shape: [4]}]}, batching: {buckets: [2]}}}
"""


def test_metrics_report_and_log_name_times_and_ids(server: TorchServeProcess, weights) -> None:
    given = {"handler": handler_path("tensor"), "config": CONFIG, "model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "timed", **given), httpx.Client(base_url=server.inference_url, timeout=60) as client:
        for pause in (0, 0, 1.2):
            time.sleep(pause)
            started = {"X-Request-Start": f"t={time.time() - 5:.3f}"}
            assert client.post("/predictions/timed", json=[[1.0, 2.0, 3.0, 4.0]], headers=started).status_code == 200
        refused = client.post("/predictions/timed", json=[[1.0]])
        assert refused.status_code == 400
        assert refused.json()["request_id"] == refused.headers["x-request-id"]
        found = server.describe("timed")["serving"]["times"]
        assert found["released"]["only_one"] == 4 and found["batch_size"]["count"] == 4
        assert found["seconds"]["queue"]["count"] == 3 and found["seconds"]["queue"]["sum"] >= 15
        until = time.monotonic() + 20
        while metric(server, "openvino_phase_seconds_count", "timed") is None:
            assert time.monotonic() < until, "TorchServe shows no phase"
            time.sleep(0.2)
        # Sent once a second: the third request sent those of the first two at least.
        assert (metric(server, "openvino_batches_total", "timed") or 0) >= 1
        text = server.http.get(server.metrics_url).text
    assert re.search(r'^openvino_phase_seconds_bucket{phase="queue",le="\+Inf",.*ModelName="timed".*} \d', text, re.M)
    assert re.search(r'^openvino_batch_size_sum{.*ModelName="timed"', text, re.M)
