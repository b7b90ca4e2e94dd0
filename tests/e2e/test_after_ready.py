"""A real TorchServe after READY: a worker that violates its policy is replaced; envelopes handle whole batches."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torchserve_process import TorchServeProcess, handler_path, loaded, torchserve

from encoder import ENCODER, encoder
from hub_models import text_model

CONFIG = """
minWorkers: 1
maxWorkers: 1
batchSize: 4
maxBatchDelay: 200
startupTimeout: 120
maxRetryTimeoutInSec: 300
pt2: {compile: {backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
handler:
  openvino:
    warmup:
      inputs:
        - {name: ids, shape: [sequence], dtype: int64, low: 0, high: 50}
        - {name: mask, shape: [sequence], dtype: int64, mask: true}
    batching: {dims: {sequence: [4, 8]}}
    fallback: {allow: [], on_violation: refuse}
"""

BREAKABLE = '''
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.tasks.tensor import TensorHandler


class Breakable(TensorHandler):
    """OpenVINO gives up for good in this worker once a request asks for it."""

    def decode(self, item):
        if item.get("body") == {"break": True}:
            def run(partition, args):
                raise RuntimeError("the device is gone")
            CompiledPartition.run = run
            item = {"body": {"inputs": {"ids": [[1, 2]]}}}
        return super().decode(item)
'''


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "encoder.pth"
    torch.save(encoder().state_dict(), path)
    return path


def ask(server: TorchServeProcess, name: str, body: Any) -> tuple[int, Any]:
    answer = server.predict(name, json.dumps(body).encode(), "application/json")
    return answer.status_code, answer.json()


def settled(server: TorchServeProcess, body: Any) -> Any:
    """Returns the answer once a worker is back; until then, only statuses 500 and 503 are allowed."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        status, answer = ask(server, "breakable", body)
        if status == 200:
            return answer
        assert status in (500, 503), answer
        time.sleep(0.2)
    raise AssertionError(f"no worker came back: {status} {answer}")


def logits(ids) -> torch.Tensor:
    with torch.no_grad():
        return encoder()(torch.tensor(ids))["logits"]


def close(got, ids) -> None:
    torch.testing.assert_close(torch.tensor(got), logits(ids), rtol=1e-4, atol=1e-4)


def test_a_worker_that_breaks_its_policy_answers_503_and_is_replaced(server, weights) -> None:
    with loaded(server, "breakable", handler=BREAKABLE, config=CONFIG, model_file=ENCODER, serialized_file=weights):
        body = {"inputs": {"ids": [[1, 2, 3]]}}
        assert ask(server, "breakable", body)[0] == 200
        first = server.describe("breakable")["pid"]
        status, answer = ask(server, "breakable", {"break": True})
        assert (
            status == 503 and answer["type"] == "ForbiddenFallbackError" and "the device is gone" in answer["message"]
        )
        # TorchServe never answers requests that it is collecting for a batch while the worker exits: none may hang.
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: settled(server, body), range(6)))
        for answer in answers:
            close(answer["logits"], body["inputs"]["ids"])
        report = server.describe("breakable")
        assert report["pid"] != first and report["serving"]["policy"]["holds"]


NUMBERS = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.last(x.relu())
"""
OWN = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler
from torchserve_openvino import OpenVINOHandler

class Own(OpenVINOHandler, BaseHandler):
    def initialize(self, context):
        self.model_dir = context.system_properties.get("model_dir")
        self.config = {"scale": 3}
        self.counters, self.state, self.report = [], "loading", None
        super().initialize(context)

    def _load_pickled_model(self, model_dir, model_file, model_pt_path):
        model = super()._load_pickled_model(model_dir, model_file, model_pt_path)
        with torch.no_grad():
            model.last.weight.mul_(self.config["scale"]), model.last.bias.mul_(self.config["scale"])
        return model

    def preprocess(self, data):
        self.counters.append(len(data))
        bodies = [row["body"] for row in data]
        return torch.tensor([each if isinstance(each, list) else json.loads(each) for each in bodies])

    def postprocess(self, data):
        return [{"scores": row, "folder": self.model_dir} for row in data.tolist()]
"""
OWN_CONFIG = """
minWorkers: 1
maxWorkers: 1
batchSize: 2
maxBatchDelay: 100
startupTimeout: 120
handler:
  openvino:
    warmup: {samples: [own_sample.json]}
    fallback: {allow: [], on_violation: refuse}
"""


def test_a_malformed_request_hits_nobody_else_and_a_users_attributes_are_theirs(server, tmp_path) -> None:
    torch.manual_seed(0)
    last, row = torch.nn.Linear(4, 2), [1.0, -2.0, 3.0, 0.5]
    torch.save({"last.weight": last.weight, "last.bias": last.bias}, tmp_path / "own.pth")
    (tmp_path / "own_sample.json").write_text(json.dumps(row))
    files = {"serialized_file": tmp_path / "own.pth", "extra_files": [tmp_path / "own_sample.json"]}
    with (
        loaded(server, "own", handler=OWN, config=OWN_CONFIG, model_file=NUMBERS, **files),
        ThreadPoolExecutor(4) as pool,
    ):
        expected = 3 * last(torch.tensor(row).relu()).detach()
        first = server.describe("own")
        for bodies in ([row], [[1.0, 2.0]], [row], [row, [1.0, 2.0], row, [1.0, 2.0]], [row]):
            for body, (status, answer) in zip(
                bodies, pool.map(lambda each: ask(server, "own", each), bodies), strict=True
            ):
                assert status == (200 if body is row else 400), answer
                if body is row:
                    torch.testing.assert_close(torch.tensor(answer["scores"]), expected, rtol=1e-4, atol=1e-5)
        report = server.describe("own")
    assert report["pid"] == first["pid"] and report["verify"]["passed"] and not report["fallbacks"]
    assert report["serving"]["policy"]["holds"] and report["serving"]["compiles_after_ready"] == 0


@pytest.fixture(scope="module", params=["json", pytest.param("kservev2", marks=pytest.mark.slow)])
def enveloped(request, tmp_path_factory) -> Iterator[tuple[TorchServeProcess, str]]:
    with torchserve(properties={"service_envelope": request.param}) as running:
        yield running, request.param


def test_envelopes_take_whole_batches_and_keep_items_apart(enveloped, weights) -> None:
    server, kind = enveloped
    good, other, bad = [[1, 2, 3]], [[4, 5, 6, 7], [8, 9, 10, 11]], [[1, 99]]

    def body(ids) -> dict[str, Any]:
        if kind == "json":
            return {"instances": ids}
        flat = [n for row in ids for n in row]
        return {"inputs": [{"name": "ids", "shape": [len(ids), len(ids[0])], "datatype": "INT64", "data": flat}]}

    arguments = {"config": CONFIG, "model_file": ENCODER, "serialized_file": weights}
    with loaded(server, "enveloped", handler=handler_path("tensor"), **arguments), ThreadPoolExecutor(4) as pool:
        bodies = [body(good), body(bad), body(other), {"nothing": 1}]
        answers = list(pool.map(lambda each: ask(server, "enveloped", each), bodies))
    assert [status for status, _ in answers] == [200, 400, 200, 400]
    assert "below 50" in answers[1][1]["message"]
    for (_, answer), ids in ((answers[0], good), (answers[2], other)):
        if kind == "json":
            close(answer["predictions"]["logits"], ids)
        else:
            output = next(o for o in answer["outputs"] if o["name"] == "logits")
            close(torch.tensor(output["data"]).reshape(output["shape"]).tolist(), ids)


TEXT_CONFIG = """
batchSize: 4
maxBatchDelay: 200
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler: {openvino: {text: {lengths: [16]}, batching: {buckets: [4]}}}
"""


@pytest.mark.slow
def test_texts_in_envelopes(enveloped, tmp_path) -> None:
    server, kind = enveloped
    folder, config = text_model("text_classifier", tmp_path / "saved"), tmp_path / "model-config.yaml"
    config.write_text(TEXT_CONFIG)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--model-name", "texts"]
    command += ["--config-file", config, "--export-path", server.model_store]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.register("texts.mar", "texts").status_code == 200, server.log_tail(60)
    server.wait_ready("texts")
    texts = ["Ada Lovelace lived in London.", "Yes"]
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    expected = [{each["label"]: pytest.approx(each["score"], abs=2e-3) for each in found} for found in pipeline(texts)]

    def body(*strings: str) -> dict[str, Any]:
        if kind == "json":
            return {"instances": list(strings)}
        return {"inputs": [{"name": "t", "shape": [len(strings)], "datatype": "BYTES", "data": list(strings)}]}

    def data(answer: Any) -> list[Any]:
        return answer["predictions"] if kind == "json" else answer["outputs"][0]["data"]

    bodies = [body(texts[0]), body("half a pair: \ud800"), body(*texts), body(texts[1], "")]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: ask(server, "texts", each), bodies))
    assert [status for status, _ in answers] == [200, 400, 200, 207], answers
    assert data(answers[0][1]) == expected[:1] and data(answers[2][1]) == expected
    assert "surrogate" in str(answers[1][1])
    good, refused = data(answers[3][1])
    assert good == expected[1] and refused["code"] == 400 and "empty" in refused["message"]
    report = server.describe("texts")
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == []
    explained = server.http.post(f"{server.inference_url}/explanations/texts", json=body(texts[0]))
    assert explained.status_code == 200 and "london" in data(explained.json())[0]["words"], explained.text
    assert [each["kind"] for each in server.describe("texts")["fallbacks"]] == ["outside_compiled"]
    if kind == "kservev2":
        assert [answer["outputs"][0]["datatype"] for _, answer in answers] == ["BYTES"] * 4
        assert (
            ask(server, "texts", {"inputs": [{"name": "t", "shape": [1], "datatype": "BYTES", "data": [7]}]})[0] == 400
        )
        tensor = {"name": "t", "shape": [2], "datatype": "INT64", "data": [1, 2]}
        status, answer = ask(server, "texts", {"inputs": [tensor]})
        assert status == 400 and "not a number" in str(answer)
