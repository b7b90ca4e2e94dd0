"""An archive made for TorchServe as a KServe predictor, asked by KServe's own clients."""

import asyncio
import ipaddress
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from commands import package
from torchserve_process import handler_path

from hub_models import text_model
from network import CONFIG, NETWORK, free_port, make_network
from torchserve_openvino.cli.reports.readiness import ServerAddress, not_ready
from torchserve_openvino.packaging.archive import run_archiver

kserve = pytest.importorskip("kserve", reason="needs the extra kserve")

pytestmark = pytest.mark.slow

ROW = [1.0, 2.0, 3.0, 4.0]
_READY_SECONDS = 120


class Predictor:
    """A running predictor, and the ports that it listens on."""

    def __init__(self, process: subprocess.Popen[bytes], http: int, grpc: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"

    def wait(self, name: str) -> None:
        until = time.monotonic() + _READY_SECONDS
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/v2/models/{name}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    async def infer(self, over_grpc: bool, rows: list[list[float]]) -> Any:
        given = kserve.InferInput("x", [len(rows), len(rows[0])], "FP32")
        given.set_data_from_numpy(np.array(rows, np.float32), binary_data=over_grpc)
        request = kserve.InferRequest("net", [given])
        if over_grpc:
            return await kserve.InferenceGRPCClient(self.grpc).infer(request)
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        return await client.infer(self.url, request, model_name="net")


@contextmanager
def predicting(archive: Path, folder: Path) -> Iterator[Predictor]:
    """A predictor of an archive."""
    http, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "torchserve_openvino.hosts.kserve", "--model", str(archive)]
    command += ["--http_port", str(http), "--grpc_port", str(grpc)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running = Predictor(process, http, grpc, folder / "log")
    try:
        running.wait(archive.stem)
        yield running
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def predictor(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predictor]:
    folder = tmp_path_factory.mktemp("kserve")
    (folder / "kserve_network.py").write_text(NETWORK)
    (folder / "model-config.yaml").write_text(CONFIG)
    arguments = ["--version", "1.0", "--model-file", str(folder / "kserve_network.py")]
    arguments += ["--serialized-file", str(weights), "--config-file", str(folder / "model-config.yaml")]
    made = run_archiver([*arguments, "--handler", handler_path("tensor")], "net", folder)
    with predicting(made, folder) as running:
        yield running


def test_it_listens_on_loopback_only(predictor: Predictor) -> None:
    process = psutil.Process(predictor.process.pid)
    pids = {each.pid for each in (process, *process.children(recursive=True))}
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    addresses = {each.laddr.ip for each in listening if each.pid in pids}
    assert addresses and all(ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in addresses)


def expected(rows: list[list[float]]) -> torch.Tensor:
    with torch.no_grad():
        return make_network()(torch.tensor(rows))


def test_version_1(predictor: Predictor) -> None:
    url = f"{predictor.url}/v1/models/net:predict"
    answer = httpx.post(url, json={"instances": [ROW, ROW]}).json()
    torch.testing.assert_close(torch.tensor(answer["predictions"]), expected([ROW, ROW]), rtol=1e-4, atol=1e-5)
    refused = httpx.post(url, json={"instances": [[1.0]]})
    assert refused.status_code == 400 and "it takes x [batch, 4]" in refused.json()["detail"]
    assert httpx.post(url, json={"rows": []}).status_code == 400


@pytest.mark.parametrize("over_grpc", [False, True])
def test_version_2_by_kserve_s_own_client(predictor: Predictor, over_grpc: bool) -> None:
    answer = asyncio.run(predictor.infer(over_grpc, [ROW, ROW]))
    (output,) = answer.outputs
    found = torch.tensor(np.array(output.as_numpy(), dtype=np.float32)).reshape(2, 3)
    torch.testing.assert_close(found, expected([ROW, ROW]), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"it takes x \[batch, 4\]") as refused:
        asyncio.run(predictor.infer(over_grpc, [[1.0]]))
    assert ("INVALID_ARGUMENT" if over_grpc else "400") in str(refused.value)


def test_ready(predictor: Predictor) -> None:
    where = ServerAddress(predictor.url, "http://127.0.0.1:9")
    assert not_ready(where, "net", 10) == "" == not_ready(where, None, 10)
    assert "404" in not_ready(where, "other", 10)


def test_report_and_metrics(predictor: Predictor) -> None:
    httpx.post(f"{predictor.url}/v1/models/net:predict", json={"instances": [ROW]})
    report = httpx.get(f"{predictor.url}/v1/models/net/report").json()
    assert report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    lines = httpx.get(f"{predictor.url}/metrics").text.splitlines()
    assert any(line.startswith("openvino_coverage_ratio{") and line.endswith(" 1.0") for line in lines)
    assert "openvino_waiting_requests 0.0" in lines


def test_standard_clients_find_their_urls(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    options = ["--hf", str(text_model("reranker", tmp_path / "saved")), "--task", "reranker", "--export-path", "."]
    (tmp_path / "config.yaml").write_text("handler: {openvino: {text: {lengths: [16]}, batching: {buckets: [1]}}}")
    package("torchserve-openvino package --model-name ranks --config-file config.yaml", tmp_path, *options)
    with predicting(tmp_path / "ranks.mar", tmp_path) as running:
        for prefix in ("", "/openai"):
            client = openai.OpenAI(base_url=f"{running.url}{prefix}/v1", api_key="none", max_retries=0)
            assert [each.id for each in client.models.list()] == ["ranks"]
            body = {"model": "ranks", "query": "a", "documents": ["b", "c"], "top_n": 1}
            answer = httpx.post(f"{running.url}{prefix}/v1/rerank", json=body)
            assert answer.status_code == 200 and len(answer.json()["results"]) == 1, answer.text
        assert httpx.get(f"{running.url}/v1/models").json()["models"] == ["ranks"]
        assert client.models.retrieve("ranks").object == "model"
        assert len(httpx.post(f"{running.url}/rerank", json={"query": "a", "texts": ["b", "c"]}).json()) == 2
        bad = httpx.post(f"{running.url}/v2/rerank", json={**body, "documents": []})
        assert bad.status_code == 400 and "documents is an empty list" in bad.json()["message"]
        large = httpx.post(f"{running.url}/v2/rerank", content=b"x" * 7_000_000)
        assert large.status_code == 413 and "max_request_bytes" in large.json()["error"]["message"]
        # What is sent to KServe's own URLs is answered as before.
        both = {"instances": [{"data": {"query": "a", "texts": ["b"]}}]}
        assert len(httpx.post(f"{running.url}/v1/models/ranks:predict", json=both).json()["predictions"][0]) == 1
