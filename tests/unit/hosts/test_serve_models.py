"""A model of `serve` and its URLs, with workers that do what a test says."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for needed in ("starlette", "prometheus_client"):
    pytest.importorskip(needed, reason="needs the extra serve")

from torchserve_openvino.errors import ModelCallError  # noqa: E402
from torchserve_openvino.hosts import http  # noqa: E402
from torchserve_openvino.hosts.batcher import Batcher, predictions  # noqa: E402
from torchserve_openvino.hosts.model_settings import ModelSettings  # noqa: E402
from torchserve_openvino.hosts.serve import routes, served_archive, unpacked_folder  # noqa: E402
from torchserve_openvino.hosts.serve.registry import Registry  # noqa: E402
from torchserve_openvino.hosts.serve.routes import Site  # noqa: E402
from torchserve_openvino.hosts.serve.served_archive import ServedArchive  # noqa: E402
from torchserve_openvino.hosts.serve.worker_process import Pending, WorkerLostError  # noqa: E402
from torchserve_openvino.serving.requests.messages import Response  # noqa: E402
from torchserve_openvino.tasks.openai import openai_error  # noqa: E402

JSON = {"content-type": "application/json"}


class Worker:
    """A worker without a process. `loads` and `runs` hold back each load and each call until they are set."""

    loads: asyncio.Event
    runs: asyncio.Event
    # Errors of the next calls.
    errors: list[Exception]
    kills: list[str]

    def __init__(self, *_: Any) -> None:
        self.awaits = self.is_ready = False
        self.started, self.calls, self.pid = 0.0, 0, 1
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        pass

    async def _until(self, event: asyncio.Event) -> None:
        await asyncio.wait({self.ended, asyncio.ensure_future(event.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise WorkerLostError(self.ended.result())

    async def until_ready(self, _: float) -> None:
        await self._until(self.loads)
        self.is_ready = True

    async def call(self, batch: Sequence[Pending], _: float) -> None:
        await self._until(self.runs)
        if self.errors:
            for pending in batch:
                pending.refuse("it fails")
            raise self.errors.pop()
        for pending in batch:
            pending.add(Response(b"ok", "text/plain"), last=True)

    async def describe(self, _: float) -> None:
        return None

    def kill(self, reason: str) -> None:
        self.kills.append(reason)
        if not self.ended.done():
            self.ended.set_result(reason)

    async def stop(self) -> None:
        self.is_ready = False
        if not self.ended.done():
            self.ended.set_result("exit code 0")


class Served:
    """One model, its URLs, and what it counts."""

    def __init__(self, workers: int = 1, queue_size: int = 5) -> None:
        self.counts: Counter[str] = Counter()
        settings = ModelSettings("net", "1.0", 1, 0.0, 20.0, 20.0, queue_size, 1, None)
        self.model = ServedArchive(Path("net.mar"), settings, workers, self.record)
        self.registry = Registry([], None, self.record)
        self.registry._models = {"net": {"1.0": self.model}}
        self.site = Site(self.registry, None, 100)  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.site.app()), base_url="http://net")

    def record(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        if name == "openvino_refused_items_total":
            self.counts[f"{labels['code']} {labels['model_name']}".strip()] += int(value)

    async def start(self) -> None:
        self.model._folder.mkdir()
        await self.model.start()

    def ask(self) -> asyncio.Task[list[Response]]:
        async def answers() -> list[Response]:
            return [piece async for piece in self.model.answer(Pending(b"", arrived=time.time()))]

        return asyncio.create_task(answers())


def run(test: Callable[[Served], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def running() -> None:
        Worker.loads, Worker.runs, Worker.errors, Worker.kills = asyncio.Event(), asyncio.Event(), [], []
        Worker.loads.set(), Worker.runs.set()
        served = Served(**options)
        try:
            await asyncio.wait_for(test(served), 20)
        finally:
            await served.model.stop(0)

    asyncio.run(running())


async def a_while() -> None:
    """Lets run what can, however long the machine takes for it."""
    for seconds in (*[0] * 50, 0.05, *[0] * 50):
        await asyncio.sleep(seconds)


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served_archive, "WorkerProcess", Worker)
    monkeypatch.setattr(served_archive, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# --- workers ------------------------------------------------------------------------------------------------------


def test_no_error_of_a_call_ends_a_worker_s_slot() -> None:
    async def test(served: Served) -> None:
        await served.start()
        Worker.errors.append(RuntimeError("unknown"))
        assert [piece.status for piece in await served.ask()] == [503]
        assert [piece.status for piece in await served.ask()] == [200]
        assert served.model.restarts == 1

    run(test)


def test_a_start_that_is_canceled_while_it_unpacks_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def extract(_: Path, folder: Path) -> None:
        for number in range(10):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).touch()
            time.sleep(0.03)

    async def test(served: Served) -> None:
        starting = asyncio.create_task(served.model.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        await asyncio.wait({starting})

    monkeypatch.setattr(served_archive, "extract", extract)
    run(test)
    assert list(tmp_path.iterdir()) == []


def test_the_end_does_not_wait_for_a_worker_that_loads_though_another_one_runs() -> None:
    async def test(served: Served) -> None:
        await served.start()
        await a_while()
        Worker.loads.clear(), Worker.runs.clear()
        other = next(process for process in served.model._processes.values())
        other.kill("it dies")
        await a_while()
        request = served.ask()
        await a_while()
        waits = served.ask()
        await a_while()
        ending = asyncio.create_task(served.model.stop(20))
        await a_while()
        # The one that loads may be for the request that waits; once that is gone, it is for none.
        assert "it is not needed any more" not in Worker.kills
        waits.cancel()
        await a_while()
        assert "it is not needed any more" in Worker.kills and not ending.done()
        Worker.runs.set()
        assert [piece.status for piece in await request] == [200]
        await ending

    run(test, workers=2)


def test_a_model_with_a_request_does_not_rest_and_one_that_rests_is_not_killed() -> None:
    async def test(served: Served) -> None:
        await served.start()
        Worker.runs.clear()
        request = served.ask()
        await a_while()
        await asyncio.wait_for(served.model.rest(), 1)
        assert served.model.state == "READY" and not Worker.kills
        Worker.runs.set()
        await request
        await served.model.rest()
        assert served.model.state == "idle" and not Worker.kills

    run(test)


def test_probes_do_not_wait_for_a_model_that_wakes() -> None:
    async def test(served: Served) -> None:
        await served.start()
        await served.model.rest()
        reported = (await served.http.get("/models/net?customized=true")).json()
        assert reported[0]["customizedMetadata"] == "it is idle"
        Worker.loads.clear()
        request = served.ask()
        await a_while()
        assert served.model.state == "loading"
        assert (await served.http.get("/v2/health/ready")).json() == {"ready": True}
        healthy = await served.http.post("/predictions/net", headers={**JSON, "openvino-health": "1"})
        assert healthy.json()["healthy"] and served.model.waiting == 1
        Worker.loads.set()
        await request

    run(test)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options", "status", "count"),
    [
        ("/predictions/net", {"content": b"x" * 101}, 413, "413 net"),
        ("/predictions/net", {"files": {"data": b"x"}}, 415, "415 net"),
        ("/predictions/other", {"content": b"x"}, 404, "404"),
        ("/v1/embeddings", {"content": b"x" * 101}, 413, "413"),
        ("/v1/embeddings", {"files": {"data": b"x"}}, 415, "415"),
        ("/openai/v1/embeddings", {"files": {"data": b"x"}}, 415, "415"),
        ("/predictions/net/v1/embeddings", {"files": {"data": b"x"}}, 415, "415 net"),
        ("/v1/audio/speech", {"content": b"x"}, 404, ""),
    ],
)
def test_what_no_worker_has_seen_is_refused_in_the_client_s_form_and_counted(
    path: str, options: dict[str, Any], status: int, count: str
) -> None:
    async def test(served: Served) -> None:
        refused = await served.http.post(path, headers={"x-request-id": "mine"}, **options)
        assert refused.status_code == status
        body = refused.json()
        assert body["error"]["type"] == "invalid_request_error" if "v1" in path else body["code"] == status
        assert served.counts == ({count: 1} if count else {})
        if count:
            assert body["request_id"] == refused.headers["x-request-id"] == "mine"

    run(test)


def test_a_body_that_is_late_and_a_server_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async def test(served: Served) -> None:
        assert (await served.http.post("/predictions/net", content=never())).status_code == 408
        served.site.drains = True
        stopped = await served.http.post("/v1/embeddings", content=b"{}")
        assert stopped.status_code == 503 and stopped.headers["connection"] == "close"
        assert stopped.json()["error"]["type"] == "server_error"
        assert served.counts == {"408 net": 1, "503 net": 1}

    monkeypatch.setattr(routes, "_BODY_SECONDS", 0.1)
    run(test)


def test_a_probe_that_a_full_queue_refuses_is_no_request() -> None:
    async def test(served: Served) -> None:
        await served.start()
        Worker.runs.clear()
        requests = [served.ask()]
        await a_while()
        requests.append(served.ask())
        await a_while()
        assert "jobQueueSize" in (await served.http.get("/v2/models/net/ready")).json()["reason"]
        assert not served.counts
        assert [piece.status for piece in await served.ask()] == [503] and served.counts == {"503 net": 1}
        Worker.runs.set()
        await asyncio.gather(*requests)

    run(test, queue_size=1)


def test_broken_json_is_refused_in_the_client_s_form_elsewhere_too() -> None:
    async def refused() -> Response:
        forwarded = http.ForwardedRequest("POST", "", "v1/embeddings", b"{", JSON, {})
        (piece,) = [piece async for piece in predictions(Batcher(Idle()), forwarded)]  # type: ignore[arg-type]
        return piece

    class Idle:
        delay = 0.0
        record = staticmethod(lambda *_: None)
        refused = staticmethod(Response.refused)

    assert json.loads(asyncio.run(refused()).body)["error"]["type"] == "invalid_request_error"


# --- streams that break off ---------------------------------------------------------------------------------------


def refusal(status: int) -> Response:
    error = ModelCallError("no")
    error.status, error.form = status, openai_error
    return Response.refused(error, "x")


@pytest.mark.parametrize("status", [422, 503])
def test_a_refusal_behind_the_first_piece_is_no_part_of_the_response(status: int) -> None:
    first, last = Response(b"data: 1\n\n", "text/event-stream"), refusal(status)
    event = json.loads(http.streamed(first, last).removeprefix(b"data: "))
    assert event == json.loads(last.body) and isinstance(event["error"]["message"], str)

    async def joined() -> Response:
        return await http.joined(first, http.only(last))

    assert asyncio.run(joined()) is last
    # A handler's own error in pieces is one response.
    assert not http.breaks_off(Response(b"a", status=422), Response(b"b", status=422))


# --- folders ------------------------------------------------------------------------------------------------------

HOLD = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from torchserve_openvino.hosts.serve.unpacked_folder import UnpackedFolder
folder = UnpackedFolder()
folder.path.mkdir()
print(folder.path, flush=True)
time.sleep(100)
"""


def test_folders_of_a_server_that_was_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    own, foreign = unpacked_folder.UnpackedFolder(), tmp_path / "torchserve-openvino-serve-no-lock"
    foreign.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        unpacked_folder.remove_abandoned()
        assert held.is_dir()
        holder.kill()
    unpacked_folder.remove_abandoned()
    assert not held.parent.exists() and own.path.parent.is_dir() and foreign.is_dir()
    own.remove()
