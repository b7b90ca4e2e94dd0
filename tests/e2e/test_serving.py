"""Models in a real TorchServe: correct answers, the report wherever it appears, isolation of requests."""

import functools
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torchserve_process import handler_path, loaded, metric

from network import NETWORK

PHOTOS = {"chelsea": "Egyptian cat", "coffee": "espresso", "rocket": "missile"}

CONFIG = """
minWorkers: 1
maxWorkers: 1
batchSize: {batch_size}
maxBatchDelay: 300
startupTimeout: 120
maxRetryTimeoutInSec: 1
pt2:
  compile:
    enable: true
    backend: openvino
    dynamic: false
    options: {options}
handler:
  openvino:
    warmup: {{inputs: [{{shape: [4], dtype: float32}}]}}
"""

OWN_HANDLER = '''
import torch
from ts.torch_handler.base_handler import BaseHandler
from torchserve_openvino import OpenVINOHandler


class Mine(OpenVINOHandler, BaseHandler):
    """A user's handler: numbers as text in, the index of the largest output out."""

    def preprocess(self, data):
        self.context.metrics.add_counter("not_in_metrics_yaml", 1, dimensions=[])
        rows = [(item.get("data") or item.get("body")).decode().split(",") for item in data]
        return torch.tensor([[float(number) for number in row] for row in rows])

    def postprocess(self, outputs):
        return [{"largest": int(index)} for index in outputs.argmax(1)]
'''


@pytest.fixture(scope="module")
def tensor_model(server, weights) -> Iterator[str]:
    """The network behind the shipped tensor handler, in batches of up to four."""
    config = CONFIG.format(batch_size=4, options="{device: CPU, config: {INFERENCE_PRECISION_HINT: f32}}")
    handler = handler_path("tensor")
    files = {"handler": handler, "model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "tensor", config=config, **files) as name:
        yield name


@pytest.fixture(scope="module")
def own_model(server, weights) -> Iterator[str]:
    """The network behind a user's own handler."""
    files = {"handler": OWN_HANDLER, "model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "own", config=CONFIG.format(batch_size=1, options="{}"), **files) as name:
        yield name


@functools.cache
def photo(name: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(getattr(data, name)()).save(buffer, format="PNG")
    return buffer.getvalue()


def best(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    probabilities = answer.json()
    return max(probabilities, key=probabilities.get)


def expected(network, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network(torch.from_numpy(rows)).numpy()


# --- the real model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PHOTOS)
def test_real_photos_get_their_class(server, efficientnet, name):
    assert best(server.predict(efficientnet, photo(name), "image/png")) == PHOTOS[name]


def test_parallel_requests_get_each_its_own_answer(server, efficientnet):
    names = list(PHOTOS) * 4
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda name: server.predict(efficientnet, photo(name), "image/png"), names))
    assert [best(answer) for answer in answers] == [PHOTOS[name] for name in names]


def test_the_description_is_the_report(server, efficientnet):
    report = server.describe(efficientnet)
    assert report["schema"] == 1
    assert report["summary"]["coverage"] == 1.0
    assert report["summary"]["fallbacks"] == 0
    assert report["summary"]["graph_breaks"] == 0
    assert report["fallbacks"] == []
    assert report["summary"]["device"] == "CPU"
    assert report["summary"]["precision"] == "f32"
    workers = server.workers(efficientnet)
    assert report["pid"] in [worker["pid"] for worker in workers]


def test_the_log_has_one_summary_line(server, efficientnet):
    lines = [line for line in server.log("model_log.log").splitlines() if f"-{efficientnet}_" in line]
    assert len([line for line in lines if "coverage 100.0%" in line]) == 1


def test_the_metrics_reach_the_prometheus_endpoint(server, efficientnet):
    server.predict(efficientnet, photo("coffee"), "image/png")
    assert metric(server, "openvino_coverage_ratio", efficientnet) == 1.0
    assert metric(server, "openvino_partitions", efficientnet) >= 1
    assert metric(server, "openvino_graph_breaks", efficientnet) == 0
    assert metric(server, "openvino_compile_seconds", efficientnet) > 0


def test_a_broken_picture_gets_4xx_and_the_next_request_an_answer(server, efficientnet):
    broken = server.predict(efficientnet, b"this is no picture", "image/png")
    assert 400 <= broken.status_code < 500
    assert set(broken.json()) >= {"code", "type", "message"}
    assert broken.json()["code"] == broken.status_code
    assert best(server.predict(efficientnet, photo("chelsea"), "image/png")) == "Egyptian cat"


# --- the tensor handler -------------------------------------------------------------------------------------


def test_tensors_as_json(server, tensor_model, network):
    rows = np.random.default_rng(0).standard_normal((1, 4), dtype=np.float32)
    answer = server.predict(tensor_model, json.dumps(rows.tolist()).encode(), "application/json")
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(answer.json(), expected(network, rows), atol=1e-5)


def test_tensors_as_npy(server, tensor_model, network):
    rows = np.random.default_rng(1).standard_normal((1, 4), dtype=np.float32)
    buffer = io.BytesIO()
    np.save(buffer, rows)
    answer = server.predict(tensor_model, buffer.getvalue(), "application/octet-stream")
    assert answer.status_code == 200, answer.text
    got = np.load(io.BytesIO(answer.content))
    np.testing.assert_allclose(got, expected(network, rows), atol=1e-5)


def kserve(rows: np.ndarray) -> bytes:
    tensor = {"name": "x", "shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def test_tensors_as_kserve_v2(server, tensor_model, network):
    rows = np.random.default_rng(2).standard_normal((2, 4), dtype=np.float32)
    answer = server.predict(tensor_model, kserve(rows), "application/json")
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert output["datatype"] == "FP32"
    assert output["shape"] == [2, 3]
    np.testing.assert_allclose(np.reshape(output["data"], (2, 3)), expected(network, rows), atol=1e-5)


def test_a_bad_item_of_a_batch_gets_4xx_and_the_others_their_answers(server, tensor_model, network):
    rows = np.random.default_rng(3).standard_normal((3, 1, 4), dtype=np.float32)
    bodies = [kserve(row) for row in rows]
    bodies.insert(1, b"{not json")
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda body: server.predict(tensor_model, body, "application/json"), bodies))
    assert [answer.status_code for answer in answers] == [200, 400, 200, 200]
    bad = answers.pop(1)
    assert "JSON" in bad.json()["message"]
    for answer, row in zip(answers, rows, strict=True):
        got = np.reshape(answer.json()["outputs"][0]["data"], (1, 3))
        np.testing.assert_allclose(got, expected(network, row), atol=1e-5)


@pytest.fixture(scope="module")
def without_relu(server, weights) -> Iterator[str]:
    """The same network with other options: relu stays in eager PyTorch."""
    properties = "{PERFORMANCE_HINT: THROUGHPUT, INFERENCE_PRECISION_HINT: f32}"
    config = CONFIG.format(batch_size=1, options=f"{{disabled_ops: [aten.relu], config: {properties}}}")
    files = {"handler": handler_path("tensor"), "model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "no-relu", config=config, **files) as name:
        yield name


def test_two_models_in_one_server_keep_their_own_options(server, tensor_model, without_relu, network):
    rows = np.random.default_rng(4).standard_normal((1, 4), dtype=np.float32)
    for model in (without_relu, tensor_model):
        answer = server.predict(model, json.dumps(rows.tolist()).encode(), "application/json")
        np.testing.assert_allclose(answer.json(), expected(network, rows), atol=1e-5)
    whole, partial = server.describe(tensor_model), server.describe(without_relu)
    assert whole["summary"]["coverage"] == 1.0
    assert whole["fallbacks"] == []
    assert partial["summary"]["coverage"] < 1.0
    assert {(entry["kind"], entry["op"]) for entry in partial["fallbacks"]} == {("disabled_op", "aten.relu.default")}
    assert metric(server, "openvino_coverage_ratio", without_relu) == pytest.approx(partial["summary"]["coverage"])
    assert metric(server, "openvino_fallbacks_total", without_relu) >= 1


# --- a user's own handler -----------------------------------------------------------------------------------


def test_a_users_own_handler_with_the_mixin(server, own_model, network):
    rows = np.random.default_rng(5).standard_normal((1, 4), dtype=np.float32)
    answer = server.predict(own_model, ",".join(str(number) for number in rows[0]).encode())
    assert answer.json() == {"largest": int(expected(network, rows).argmax())}
    assert server.describe(own_model)["summary"]["coverage"] == 1.0


def test_torchserve_drops_a_metric_that_metrics_yaml_does_not_name(server, own_model):
    """Why model-config/metrics.yaml names each of our metrics: TorchServe drops the lines of all others."""
    assert server.predict(own_model, b"1,2,3,4").status_code == 200
    assert metric(server, "openvino_coverage_ratio", own_model) == 1.0
    assert "not_in_metrics_yaml" not in server.http.get(server.metrics_url).text
