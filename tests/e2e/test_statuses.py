"""Errors arrive as errors over HTTP and gRPC, and between the nodes of a workflow."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from torchserve_process import ROOT, TorchServeProcess, load, program, torchserve

from documents import commands
from torchserve_openvino.bench.ports import free_ports

MODEL = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x)
"""
CONFIG = """
minWorkers: 1
maxWorkers: 1
handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}
"""
HANDLER = """
from torchserve_openvino.tasks.tensor import TensorHandler
class Mine(TensorHandler):
    pass
"""
WORKFLOW = """
models:
  min-workers: 1
  max-workers: 1
  first: {url: linear.mar}
  second: {url: linear.mar}
dag:
  first: [second]
"""
GOOD, BAD = b"[[1.0, 2.0, 3.0, 4.0]]", b'[["no", "numbers"]]'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchServeProcess, int, Path]]:
    workflows, (port, management) = tmp_path_factory.mktemp("workflows"), free_ports(2)
    properties = {
        "grpc_inference_port": str(port), "grpc_management_port": str(management), "workflow_store": str(workflows)
    }  # fmt: skip
    weights = tmp_path_factory.mktemp("weights") / "w.pth"
    torch.save({"layer.weight": torch.eye(4), "layer.bias": torch.zeros(4)}, weights)
    with torchserve(properties=properties) as running:
        load(running, "linear", handler=HANDLER, config=CONFIG, model_file=MODEL, serialized_file=weights)
        yield running, port, workflows


def by_grpc(port: int, body: bytes) -> bytes:
    """PredictionsRequest {model_name = 1; map<string, bytes> input = 3}, encoded by hand: there are no stubs."""

    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    message = field(1, b"linear") + field(3, field(1, b"data") + field(2, body))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
        return bytes(call(message, timeout=60))


def test_over_http_the_item_has_its_own_status(server) -> None:
    running, _, _ = server
    assert running.predict("linear", GOOD).status_code == 200
    refused = running.predict("linear", BAD)
    assert refused.status_code == 400 and refused.json()["code"] == 400


def test_a_form_is_named_as_what_went_wrong(server) -> None:
    running, *_ = server
    for content in (b"I like this", GOOD, b"a=b&c=d", b"\xff\xd8\xff\xe0binary"):
        kind = "application/x-www-form-urlencoded"
        response = running.predict("linear", content, kind)
        assert response.status_code == 400, response.text
        assert "came as a form" in response.text and "curl -T FILE" in response.text and "\\u" not in response.text
        assert "binary" not in response.json()["message"].replace("--data-binary", "")


def test_the_script_of_the_docs_answers_over_grpc(server, tmp_path: Path) -> None:
    _, port, _ = server
    (line,) = [each for each in commands() if each.startswith("python scripts/predict_grpc.py")]
    # Longer than 127 bytes: its length takes two.
    rows = [[1.0, 2.0, 3.0, 4.0]] * 30

    def ask(body: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "cat.jpg").write_text(body)
        arguments = line.replace(" net ", " linear ").replace("cat.jpg", str(tmp_path / "cat.jpg")).split()[1:]
        command = [sys.executable, *arguments, "--address", f"127.0.0.1:{port}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    done = ask(json.dumps(rows))
    assert done.returncode == 0 and json.loads(done.stdout) == rows, done.stderr
    refused = ask('[["no", "numbers"]]')
    assert refused.returncode == 1 and "INVALID_ARGUMENT" in refused.stderr and "nested lists" in refused.stderr


def test_over_grpc_a_refusal_is_no_prediction(server) -> None:
    _, port, _ = server
    assert b"1.0" in by_grpc(port, GOOD)
    with pytest.raises(grpc.RpcError) as refused:
        by_grpc(port, BAD)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "nested lists of numbers" in refused.value.details()


def test_in_a_workflow_a_refusal_does_not_go_on(server, tmp_path) -> None:
    running, _, workflows = server
    (tmp_path / "spec.yaml").write_text(WORKFLOW)
    (tmp_path / "functions.py").write_text("def unused(data, context):\n    return data\n")
    archiver = [program("torch-workflow-archiver"), "--workflow-name", "flow", "--export-path", str(workflows)]
    files = ["--spec-file", str(tmp_path / "spec.yaml"), "--handler", str(tmp_path / "functions.py")]
    subprocess.run([*archiver, *files], check=True, capture_output=True)
    made = running.http.post(f"{running.management_url}/workflows", params={"url": "flow.war"}, timeout=180)
    assert made.status_code == 200, made.text
    ask = f"{running.inference_url}/wfpredict/flow"
    assert running.http.post(ask, content=GOOD, timeout=60).status_code == 200
    refused = running.http.post(ask, content=BAD, timeout=60)
    assert refused.status_code >= 400 and "first" in refused.text


def test_counters_are_at_zero_and_gauges_carry_worker_and_version(server) -> None:
    running, _, _ = server
    text = running.http.get(running.metrics_url).text
    (line,) = [line for line in text.splitlines() if line.startswith("openvino_verified{") and '"linear"' in line]
    assert 'version="1.0"' in line and 'worker="90' in line and line.endswith(" 1.0")
    names = ("openvino_padded_rows_total", "openvino_shadow_mismatches_total", "openvino_compiles_after_ready_total")
    for name in names:
        counters = [line for line in text.splitlines() if line.startswith(f"{name}{{") and '"linear"' in line]
        assert counters and all(line.endswith(" 0.0") for line in counters), counters
