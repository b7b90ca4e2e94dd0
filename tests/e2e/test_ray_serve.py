"""An archive made for TorchServe on a real Ray Serve: answers, statuses, reports, and replicas that die."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from commands import package
from torchserve_process import ROOT, handler_path

from chat_models import eager_tokens, language_model, text_of
from hub_models import text_model
from network import CONFIG, NETWORK, free_port, make_network
from torchserve_openvino.packaging.archive import run_archiver

ray = pytest.importorskip("ray", reason="needs the extra ray")
serve = pytest.importorskip("ray.serve")
adapter = pytest.importorskip("torchserve_openvino.hosts.ray")

pytestmark = pytest.mark.slow

# Hangs on one request, and computes a part of the model in eager on another.
SLEEPY = """
import time
import torch
from torchserve_openvino.tasks.tensor import TensorHandler
class Sleepy(TensorHandler):
    def decode(self, item):
        if item.get("body") == "sleep":
            time.sleep(60)
        if item.get("body") == "eager":
            next(self.model.children())(torch.zeros(1, 4))
            item = {"body": [[0.0] * 4]}
        return super().decode(item)
"""
_READY_SECONDS = 180
# Statuses of what a killed replica was computing. HAProxy closes the connection instead (0).
# RAY_SERVE_ENABLE_HA_PROXY=1 in the environment runs these tests with it.
_LOST = {500, 503} | ({0} if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else set())


class Served:
    """A cluster with two nodes, and an HTTP proxy."""

    def __init__(self, cluster: Any, nodes: list[Any], port: int) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, *archives: Path, **options: Any) -> None:
        args = adapter.AppArgs(archives=[str(path) for path in archives], cpus=0.5, **options)
        serve.run(adapter.app(args), name="models", route_prefix="/")

    def reports(self, name: str) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/models/{name}/replicas", timeout=30).raise_for_status().json()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # Imported here: `ray` may be missing.
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    # Nodes are processes of this machine: the first has the proxy, the second can be removed.
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT / "handlers"), os.environ.get("PYTHONPATH", "")])}
    }
    nodes = [cluster.add_node(num_cpus=3, object_store_memory=100 * 2**20) for _ in range(2)]
    ray.init(address=cluster.address, runtime_env=environment, log_to_driver=False)
    port = free_port()
    # Both nodes have the same addresses, so one proxy has to do.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        yield Served(cluster, nodes, port)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def archives(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "ray_network.py").write_text(NETWORK)
    (folder / "model-config.yaml").write_text(CONFIG)
    arguments = [
        "--version",
        "1.0",
        "--model-file",
        str(folder / "ray_network.py"),
        "--handler",
        handler_path("tensor"),
    ]
    arguments += ["--serialized-file", str(weights), "--config-file", str(folder / "model-config.yaml")]
    return [run_archiver(arguments, name, folder) for name in ("first", "second")]


@pytest.fixture(scope="module")
def sleepy(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sleepy")
    (folder / "sleepy_handler.py").write_text(SLEEPY)
    (folder / "sleepy_network.py").write_text(NETWORK)
    config = CONFIG.replace("responseTimeout: 60", "responseTimeout: 2")
    policy = "fallback: {allow: [], on_violation: refuse}, warmup:"
    (folder / "model-config.yaml").write_text(config.replace("warmup:", policy))
    arguments = ["--version", "1.0", "--model-file", str(folder / "sleepy_network.py")]
    arguments += ["--handler", str(folder / "sleepy_handler.py"), "--serialized-file", str(weights)]
    return run_archiver([*arguments, "--config-file", str(folder / "model-config.yaml")], "sleepy", folder)


def expected(row: list[float]) -> torch.Tensor:
    with torch.no_grad():
        return make_network()(torch.tensor([row]))


def test_answers_statuses_and_reports(served: Served, archives: list[Path]) -> None:
    served.deploy(archives[0])
    with httpx.Client(base_url=served.url, timeout=30) as client:
        answer = client.post("/predictions/first", json=[[1.0, 2.0, 3.0, 4.0]])
        torch.testing.assert_close(torch.tensor(answer.json()), expected([1.0, 2.0, 3.0, 4.0]), rtol=1e-4, atol=1e-5)
        assert answer.headers["content-type"] == "application/json"
        assert client.post("/predictions/first", json=[[1.0]]).status_code == 400
        assert client.post("/predictions/first/1.0", json=[[1.0, 2.0, 3.0, 4.0]]).status_code == 200
        large = client.post("/predictions/first", content=b"x" * 7_000_000)
        assert large.status_code == 413 and "max_request_bytes" in large.json()["message"]
        report = client.get("/models/first").json()
        for path in ("/v2/health/ready", "/v2/models/first/ready", "/v2/models/first/versions/1.0/ready"):
            assert (client.get(path).status_code, client.get(path).json()) == (200, {"ready": True})
    assert report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    (only,) = served.reports("first")
    assert only["replica"] == report["replica"] and only["serving"]["counts"]["requests"] == 3


def test_several_models_in_one_app(served: Served, archives: list[Path]) -> None:
    served.deploy(*archives)
    with httpx.Client(base_url=served.url, timeout=30) as client:
        for name in ("first", "second"):
            answer = client.post(f"/predictions/{name}", json=[[1.0, 2.0, 3.0, 4.0]])
            torch.testing.assert_close(torch.tensor(answer.json()), expected([1, 2, 3, 4.0]), rtol=1e-4, atol=1e-5)
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get("/v2/models/second/ready").json() == {"ready": True}
        assert client.get("/v2/models/third/ready").status_code == 404
        missing = client.post("/predictions/third", json=[])
        assert missing.status_code == 404 and "first, second" in missing.json()["message"]


def test_text_is_streamed_to_the_client_of_openai(served: Served, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("openvino_genai")
    folder = language_model(tmp_path / "llama")
    options = ["--hf", str(folder), "--config-file", str(ROOT / "model-config" / "text-generation.yaml")]
    package("torchserve-openvino package --task text-generation --model-name chat --export-path .", tmp_path, *options)
    served.deploy(tmp_path / "chat.mar")
    client = openai.OpenAI(base_url=f"{served.url}/predictions/chat/1.0/v1", api_key="none", max_retries=0, timeout=60)
    how: Any = {"model": "chat", "prompt": "Hello", "temperature": 0, "max_tokens": 24}
    text = text_of(eager_tokens(folder, "Hello", 24))
    assert client.completions.create(**how).choices[0].text == text
    assert (
        "".join(choice.text for chunk in client.completions.create(**how, stream=True) for choice in chunk.choices)
        == text
    )
    how |= {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    times = [time.perf_counter() for _ in client.completions.create(**how, stream=True)]
    assert len(times) > 5 and times[-1] > times[0]
    with pytest.raises(openai.BadRequestError, match="longest sequence"):
        client.completions.create(model="chat", prompt=[7] * 600, stream=True)
    (report,) = served.reports("chat")
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0


def test_standard_clients_find_their_urls(served: Served, archives: list[Path], tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    save = text_model("sentence_embedder", tmp_path / "saved")
    options = ["--hf", str(save), "--model-name", "vectors", "--export-path", "."]
    (tmp_path / "config.yaml").write_text("handler: {openvino: {text: {lengths: [16]}, batching: {buckets: [1]}}}")
    package("torchserve-openvino package --config-file config.yaml", tmp_path, *options)
    served.deploy(tmp_path / "vectors.mar", archives[0])
    several = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    assert sorted(each.id for each in several.models.list()) == ["first", "vectors"]
    found = several.embeddings.create(model="vectors", input=["a", "b"])
    assert len(found.data) == 2 and len(found.data[0].embedding) == 32
    with pytest.raises(openai.NotFoundError, match="first, vectors"):
        several.embeddings.create(model="third", input="a")
    assert httpx.post(f"{served.url}/embed", json={"inputs": "a"}).status_code == 400
    served.deploy(tmp_path / "vectors.mar")
    assert several.models.retrieve("vectors").id == "vectors"
    alone = several.embeddings.create(model="vectors", input="a").data[0].embedding
    assert alone == pytest.approx(found.data[0].embedding, abs=1e-4)
    (vector,) = httpx.post(f"{served.url}/embed", json={"inputs": "a", "normalize": False}).json()
    assert vector == pytest.approx(alone, abs=1e-4)
    below = openai.OpenAI(base_url=f"{served.url}/predictions/vectors/1.0/v1", api_key="none", max_retries=0)
    assert [each.id for each in below.models.list()] == ["vectors"]


async def _ask(url: str, count: int, disturb: Any) -> list[tuple[list[float], int, Any]]:
    """Sends requests from 16 clients, a quarter of them bad; returns what each got."""
    chance = random.Random(1)
    rows = [[round(chance.uniform(-2, 2), 3) for _ in range(4 if chance.random() > 0.25 else 3)] for _ in range(count)]
    waiting = iter(enumerate(rows))
    answers: dict[int, tuple[int, Any]] = {}

    async def client() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for number, row in waiting:
                if number in disturb:
                    await asyncio.to_thread(disturb[number])
                try:
                    answer = await http.post(f"{url}/predictions/first", json=[row])
                    found = (answer.status_code, answer.json() if answer.status_code == 200 else answer.text)
                except httpx.TransportError as error:
                    found = (0, type(error).__name__)
                assert number not in answers
                answers[number] = found

    await asyncio.gather(*[client() for _ in range(16)])
    return [(row, *answers[number]) for number, row in enumerate(rows)]


def test_a_killed_replica_and_a_removed_node_under_load(served: Served, archives: list[Path]) -> None:
    served.deploy(archives[0], replicas=4)
    until = time.monotonic() + _READY_SECONDS
    while len(served.reports("first")) < 4:
        assert time.monotonic() < until, "four replicas are not READY"
        time.sleep(0.5)

    def kill() -> None:
        os.kill(served.reports("first")[0]["pid"], signal.SIGKILL)

    disturb = {500: kill, 1000: lambda: served.cluster.remove_node(served.nodes[1])}
    found = asyncio.run(_ask(served.url, 2000, disturb))
    statuses = Counter((len(row) == 4, status) for row, status, _ in found)
    print(statuses)
    for row, status, body in found:
        if status == 200:
            torch.testing.assert_close(torch.tensor(body), expected(row), rtol=1e-4, atol=1e-5)
        assert (status == 400) is (len(row) == 3) or status in _LOST, (row, status, body)
    # What was under way on a process that died fails; everything else is answered.
    lost = sum(count for (_, status), count in statuses.items() if status in {500, 503})
    assert lost <= 64, statuses


@pytest.mark.parametrize(
    ("body", "reason", "replaced"),
    [("sleep", "responseTimeout (2 s)", True), ("eager", "outside_compiled", False)],
    ids=["hangs", "violates"],
)
def test_a_replica_that_hangs_is_replaced_and_one_that_violates_its_policy_refuses_that_request(
    served: Served, sleepy: Path, body: str, reason: str, replaced: bool
) -> None:
    served.deploy(sleepy)
    (before,) = served.reports("sleepy")
    with httpx.Client(base_url=served.url, timeout=60) as client:
        failed = client.post("/predictions/sleepy", content=body, headers={"content-type": "text/plain"})
        assert failed.status_code == 503 and reason in failed.json()["message"], failed.text
        until = time.monotonic() + _READY_SECONDS
        while (answer := client.post("/predictions/sleepy", json=[[1.0, 2.0, 3.0, 4.0]])).status_code != 200:
            assert answer.status_code == 503 and time.monotonic() < until, answer.text
            time.sleep(0.5)
    torch.testing.assert_close(torch.tensor(answer.json()), expected([1.0, 2.0, 3.0, 4.0]), rtol=1e-4, atol=1e-5)
    assert (served.reports("sleepy")[0]["pid"] != before["pid"]) is replaced


def test_replicas_follow_the_load_and_compile_nothing_that_the_archive_holds(
    served: Served, weights: Path, tmp_path: Path
) -> None:
    (tmp_path / "grown_network.py").write_text(NETWORK)
    (tmp_path / "model-config.yaml").write_text(CONFIG)
    files = "--model-file grown_network.py --config-file model-config.yaml --handler tensor --export-path ."
    package(
        f"torchserve-openvino package --model-name grown {files} --precompile",
        tmp_path,
        "--serialized-file",
        str(weights),
    )
    served.deploy(tmp_path / "grown.mar", max_replicas=2)
    assert len(served.reports("grown")) == 1
    ended = threading.Event()

    async def load() -> set[int]:
        statuses: set[int] = set()
        async with httpx.AsyncClient(timeout=60) as http:
            while not ended.is_set():
                asked = [http.post(f"{served.url}/predictions/grown", json=[[1.0, 2.0, 3.0, 4.0]]) for _ in range(64)]
                statuses |= {answer.status_code for answer in await asyncio.gather(*asked)}
        return statuses

    def watch() -> list[dict[str, Any]]:
        until = time.monotonic() + _READY_SECONDS
        while len(reports := served.reports("grown")) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        ended.set()
        return reports

    async def both() -> tuple[set[int], list[dict[str, Any]]]:
        return await asyncio.gather(load(), asyncio.to_thread(watch))  # type: ignore[return-value]

    statuses, reports = asyncio.run(both())
    assert statuses == {200} and len(reports) == 2
    for report in reports:
        assert (report["cache"]["traces"], report["cache"]["compiles"]) == (0, 0) and report["verify"]["passed"]


def test_an_update_loses_no_request(served: Served, archives: list[Path]) -> None:
    served.deploy(archives[0], replicas=2)
    before = {report["replica"] for report in served.reports("first")}
    changed = threading.Event()

    async def load() -> Counter[int]:
        statuses: Counter[int] = Counter()
        async with httpx.AsyncClient(timeout=60) as http:
            while not changed.is_set():
                answers = await asyncio.gather(
                    *[http.post(f"{served.url}/predictions/first", json=[[1.0, 2.0, 3.0, 4.0]]) for _ in range(8)]
                )
                statuses.update(answer.status_code for answer in answers)
        return statuses

    def update() -> None:
        # Another limit is another configuration: all replicas are replaced.
        served.deploy(archives[0], replicas=2, max_request_bytes=1_000_000)
        changed.set()

    async def both() -> Counter[int]:
        statuses, _ = await asyncio.gather(load(), asyncio.to_thread(update))
        return statuses

    statuses = asyncio.run(both())
    assert set(statuses) == {200} and statuses[200] > 100, statuses
    until = time.monotonic() + _READY_SECONDS
    while {report["replica"] for report in served.reports("first")} & before:
        assert time.monotonic() < until, "the old replicas are still there"
        time.sleep(0.5)


def test_the_configuration_of_the_command(archives: list[Path], tmp_path: Path) -> None:
    base = [sys.executable, "-m", "torchserve_openvino.cli", "ray"]
    printed = subprocess.run(
        [*base, "config", archives[0], "--max-replicas", "3"], check=True, capture_output=True, text=True
    )
    (application,) = yaml.safe_load(printed.stdout)["applications"]
    assert adapter.AppArgs(**application["args"]).max_replicas == 3
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema(**yaml.safe_load(printed.stdout))
    for more, expected_error in (
        ([tmp_path / "no.mar"], "no.mar is not a file. Name the path of a .mar."),
        ([archives[0], "--haproxy", "--address", "auto"], "RAY_SERVE_ENABLE_HA_PROXY=1"),
    ):
        failed = subprocess.run([*base, "deploy", *more], check=False, capture_output=True, text=True)
        assert failed.returncode == 1 and expected_error in failed.stderr


@pytest.mark.parametrize("option", [("--address", "local"), ("--haproxy",)], ids=lambda option: option[0])
def test_the_command(option: tuple[str, ...], archives: list[Path], tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "torchserve_openvino.cli", "ray", "deploy", archives[0], *option]
    command += ["--port", str(port), "--cpus", "0.5"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _READY_SECONDS
        while b"READY: first" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.2)
        answer = httpx.post(f"http://127.0.0.1:{port}/predictions/first", json=[[1.0, 2.0, 3.0, 4.0]])
        torch.testing.assert_close(torch.tensor(answer.json()), expected([1.0, 2.0, 3.0, 4.0]), rtol=1e-4, atol=1e-5)
    finally:
        process.terminate()
        assert process.wait(60) == 0
