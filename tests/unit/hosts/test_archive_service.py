"""`ArchiveService` and `Batcher`: an archive made for TorchServe answers without it."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ts.protocol.otf_message_handler import create_predict_response
from typer.testing import CliRunner

from encoder import build
from network import NETWORK
from torchserve_openvino.cli import app
from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError, PackagingError
from torchserve_openvino.hosts import batcher
from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
from torchserve_openvino.hosts.batch_delay import BatchDelay
from torchserve_openvino.hosts.batcher import Batcher
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.serving.requests.messages import EnvelopeKind, Request, Response
from torchserve_openvino.serving.torchserve.context import Context

CONFIG = """
batchSize: 4
maxBatchDelay: 50
responseTimeout: 20
pt2: {compile: {enable: true, backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}
"""
OWN = """
import torch
from ts.torch_handler.base_handler import BaseHandler
class Own(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row["body"][0] for row in data])
"""
BLOCKED = """
import sys
sys.modules["ts"] = None
from importlib.util import find_spec
from pathlib import Path
from torchserve_openvino.hosts.archive_service import ArchiveService
from torchserve_openvino.serving.requests.messages import Request
service = ArchiveService(Path(sys.argv[1]), lambda *_: None)
(answer,) = service.answer([Request({"body": [[0.5, -1.0, 2.0, 0.1]]})])
assert not [name for name in sys.modules if name.startswith("ts.")]
print("answered:", answer.status, answer.body.decode().replace("\\n", ""))
"""
WARM = """
import sys
from pathlib import Path
from torchserve_openvino.hosts.archive_service import ArchiveService
from torchserve_openvino.serving.requests.messages import Request
service = ArchiveService(Path(sys.argv[1]), lambda *_: None)
before = set(sys.modules)
(answer,) = service.answer([Request({"body": [[0.5, -1.0, 2.0, 0.1]]})])
assert answer.status == 200, answer
assert service.describe()["cache"]["traces"] == 0, service.describe()["cache"]
print("tracing:", [name for name in ("torch._dynamo", "torch._inductor", "sympy", "networkx") if name in sys.modules])
print("first request:", sorted(set(sys.modules) - before))
"""
ROW = [0.5, -1.0, 2.0, 0.1]


def archive(folder: Path, name: str, handler: str = "tensor", config: str = CONFIG, *more: object) -> Path:
    (folder / "hosted_model.py").write_text(NETWORK)
    (folder / f"{name}.yaml").write_text(config)
    torch.save(build(NETWORK, "Network").state_dict(), folder / "weights.pth")
    arguments = [
        *("--model-name", name, "--model-file", folder / "hosted_model.py"),
        *("--serialized-file", folder / "weights.pth", "--handler", handler),
        *("--config-file", folder / f"{name}.yaml", "--export-path", folder, *more),
    ]
    result = CliRunner().invoke(app, ["package", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return folder / f"{name}.mar"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive(tmp_path_factory.mktemp("store"), "hosted")


@pytest.fixture(scope="module")
def metrics() -> Counter[str]:
    return Counter()


@pytest.fixture(scope="module")
def service(packed: Path, metrics: Counter[str]) -> Iterator[ArchiveService]:
    path = list(sys.path)
    yield ArchiveService(packed, lambda kind, name, value, labels: metrics.update({f"{kind} {name}": value}))
    sys.path[:] = path


def expected(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    with torch.no_grad():
        return build(NETWORK, "Network")(torch.tensor(rows))


def ask(batcher: Batcher, *bodies: Any, envelope: EnvelopeKind | None = None) -> list[Response]:
    async def one(body: Any) -> Response:
        (piece,) = [piece async for piece in batcher.submit(Request({"body": body}, envelope=envelope))]
        return piece

    async def together() -> list[Response]:
        return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(together())


def test_requests_share_a_call_and_each_has_its_own_status(service: ArchiveService, metrics: Counter[str]) -> None:
    before = service.describe()["serving"]["counts"].get("requests", 0)
    answers = ask(Batcher(service), [ROW], "text", [[1, 2]], [[0.0, 1.0, 0.0, 1.0]])
    assert [answer.status for answer in answers] == [200, 415, 400, 200]
    for answer, row in ((answers[0], ROW), (answers[3], [0.0, 1.0, 0.0, 1.0])):
        torch.testing.assert_close(torch.tensor(json.loads(answer.body)), expected([row]), rtol=1e-4, atol=1e-5)
    assert json.loads(answers[2].body)["type"] == "OutsideDeclaredError"
    assert {answer.content_type for answer in answers} == {"application/json"}
    report = service.describe()
    assert report["serving"]["counts"]["requests"] == before + 4
    assert report["summary"]["coverage"] == 1.0 and report["serving"]["compiles_after_ready"] == 0
    assert metrics["gauge openvino_verified"] and metrics["gauge openvino_coverage_ratio"]


def test_a_call_has_requests_of_one_protocol(service: ArchiveService) -> None:
    async def mixed() -> list[Response]:
        batcher, envelope = Batcher(service), "json"

        async def one(request: Request) -> Response:
            (piece,) = [piece async for piece in batcher.submit(request)]
            return piece

        plain, inside = Request({"body": [ROW]}), Request({"body": {"instances": [ROW, ROW]}}, envelope=envelope)
        return list(await asyncio.gather(*map(one, [plain, inside, plain])))

    answers = asyncio.run(mixed())
    assert [answer.status for answer in answers] == [200, 200, 200]
    predictions = torch.tensor(json.loads(answers[1].body)["predictions"])
    torch.testing.assert_close(predictions, expected([ROW, ROW]), rtol=1e-4, atol=1e-5)


def test_the_host_s_own_library_gets_waits_phases_and_batches(packed: Path) -> None:
    path, seen = list(sys.path), []
    own = ArchiveService(packed, lambda *values: seen.append(values))
    ask(Batcher(own), [ROW], [ROW])
    sys.path[:] = path
    values = [
        (name, value, labels) for _, name, value, labels in seen if name.startswith(("openvino_ph", "openvino_ba"))
    ]
    phases = [labels["phase"] for name, _, labels in values if name == "openvino_phase_seconds"]
    assert sorted(phases) == ["decode", "encode", "inference", "queue", "queue"]
    waits = [value for name, value, labels in values if labels == {"phase": "queue"}]
    # The first request waits for the second one, or for as long as the YAML says.
    assert all(0 <= wait < 5 for wait in waits)
    assert [value for name, value, _ in values if name == "openvino_batch_size"] == [2]
    report = own.describe()["serving"]["times"]
    assert report["seconds"]["queue"]["count"] == 2 and sum(report["released"].values()) == 1


def test_a_refusal_names_its_request(service: ArchiveService) -> None:
    async def one(name: str, body: Any) -> Response:
        request = Request({"body": body}, id=name)
        (piece,) = [piece async for piece in Batcher(service, queue_size=0 if name == "full" else 9).submit(request)]
        return piece

    for name, body, status in (("bad", [[1.0]], 400), ("full", [ROW], 503)):
        answer = asyncio.run(one(name, body))
        assert answer.status == status and json.loads(answer.body)["request_id"] == name


def test_a_full_queue_refuses(service: ArchiveService) -> None:
    answers = ask(Batcher(service, queue_size=3), *[[ROW]] * 20)
    statuses = Counter(int(answer.status) for answer in answers)
    assert statuses[503] and statuses[200] >= 3 and sum(statuses.values()) == 20
    refused = next(answer for answer in answers if answer.status == 503)
    assert "3 requests are waiting already" in json.loads(refused.body)["message"]


def health(service: ArchiveService, *more: Request) -> list[Response]:
    probe = Request({"body": {}}, {"OpenVINO-Health": "1", "explain": "False"})
    return service.answer([*more, probe])


def test_a_probe_runs_the_warm_up_sample_beside_other_requests(service: ArchiveService) -> None:
    before = service.describe()["serving"]["counts"]["requests"]
    answer, state = health(service, Request({"body": [ROW]}))
    torch.testing.assert_close(torch.tensor(json.loads(answer.body)), expected([ROW]), rtol=1e-4, atol=1e-5)
    assert state.status == 200 and json.loads(state.body) == {"healthy": True, "sample": "batch 1", "verified": True}
    # It is no request, and is not counted as one.
    assert service.describe()["serving"]["counts"]["requests"] == before + 1


def test_a_probe_names_what_is_wrong(service: ArchiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = service.handler._openvino

    def refused(words: str) -> None:
        (state,) = health(service)
        body = json.loads(state.body)
        assert state.status == 503 and not body["healthy"] and words in body["reason"]

    with monkeypatch.context() as patch:
        patch.setattr(worker.state.watch, "violations", ["coverage fell below min_coverage 90.0%"])
        refused("the policy is violated: coverage fell")
    with monkeypatch.context() as patch:
        record = worker.report.tracker.verify
        patch.setattr(type(record), "to_dict", lambda _: {"passed": False, "problems": ["batch 1: is 3 off"]})
        refused("verification failed: batch 1: is 3 off")
    with monkeypatch.context() as patch:
        patch.setattr(worker.health, "_expected", [worker.health._expected[0] + 1])
        refused("its warm-up sample (batch 1) is answered wrongly, output 0")
    with monkeypatch.context() as patch:
        patch.setattr(worker.health, "_model", type("Broken", (), {"compiled": 7})())
        refused("its warm-up sample (batch 1) fails: TypeError")
    (state,) = health(service)
    assert state.status == 200


class Slow:
    """Answers after a while, or not at all."""

    name, batch_size, delay, timeout, awaits = "slow", 2, 0.0, 0.2, False

    def __init__(self) -> None:
        self.ended = ""
        self.release = threading.Event()
        self.record = lambda *_: None

    refused = staticmethod(Response.refused)

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        if requests[0].row["body"] == "fail":
            raise MemoryError
        self.release.wait(5)
        return [Response(b"late", "text/plain")] * len(requests)


def test_a_call_that_takes_too_long_ends_the_process() -> None:
    slow = Slow()
    (answer,) = ask(Batcher(slow), "")  # type: ignore[arg-type]
    assert answer.status == 503 and "responseTimeout (0.2 s)" in json.loads(answer.body)["message"]
    assert "responseTimeout" in slow.ended
    # What comes later, and what waited already, is refused at once.
    start = time.monotonic()
    (answer,) = ask(Batcher(slow), "")  # type: ignore[arg-type]
    assert answer.status == 503 and time.monotonic() - start < 0.15
    slow.ended = ""
    answers = ask(Batcher(slow), *[""] * 9)  # type: ignore[arg-type]
    assert {answer.status for answer in answers} == {503} and time.monotonic() - start < 0.5
    slow.release.set()


def test_requests_after_a_failed_call_are_answered() -> None:
    slow = Slow()
    slow.release.set()

    async def both() -> list[Response]:
        batcher = Batcher(slow)  # type: ignore[arg-type]
        responses = []
        for body in ("fail", "", ""):
            responses += [piece async for piece in batcher.submit(Request({"body": body}))]
        return responses

    assert [answer.status for answer in asyncio.run(both())] == [500, 200, 200]


def test_what_waits_is_joined_though_no_time_is_left() -> None:
    slow, sizes, begun = Slow(), [], threading.Event()

    def answer(requests: Sequence[Request]) -> list[Response]:
        if requests[0].row["body"] == "first":
            begun.set()
            while batcher.waiting < 9:
                time.sleep(0.001)
        else:
            sizes.append(len(requests))
        return [Response(b"", "text/plain")] * len(requests)

    async def one(body: str) -> list[Response]:
        return [piece async for piece in batcher.submit(Request({"body": body}))]

    async def nine_behind_one() -> None:
        first = asyncio.create_task(one("first"))
        await asyncio.to_thread(begun.wait)
        await asyncio.gather(first, *(one("") for _ in range(9)))

    slow.answer, slow.timeout = answer, 5  # type: ignore[method-assign]
    batcher = Batcher(slow)  # type: ignore[arg-type]
    asyncio.run(nine_behind_one())
    assert sizes == [2, 2, 2, 2, 1]


def test_a_client_alone_does_not_wait_for_company_that_cannot_come() -> None:
    slow, sizes = Slow(), []
    slow.delay, slow.batch_size, slow.timeout = 0.2, 4, 5

    def answer(requests: Sequence[Request]) -> list[Response]:
        sizes.append(len(requests))
        slow.release.wait(5)
        return [Response(b"", "text/plain")] * len(requests)

    async def one(body: str, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        _ = [piece async for piece in batcher.submit(Request({"body": body}))]

    async def one_by_one_then_together() -> float:
        slow.release.set()
        for _ in range(8):
            await one("")
        start = time.monotonic()
        for _ in range(8):
            await one("")
        alone = time.monotonic() - start
        slow.release.clear()
        running = asyncio.create_task(one("runs"))
        await asyncio.sleep(0.05)
        behind = [asyncio.create_task(one("", after)) for after in (0.0, 0.05, 0.1)]
        await asyncio.sleep(0.02)
        slow.release.set()
        await asyncio.gather(running, *behind)
        return alone

    slow.answer = answer  # type: ignore[method-assign]
    batcher = Batcher(slow)  # type: ignore[arg-type]
    # Eight waits of 0.2 s would be 1.6.
    assert asyncio.run(one_by_one_then_together()) < 0.8
    # The three came while one ran, and waited for each other again.
    assert sizes == [1] * 17 + [3]


@given(
    events=st.lists(
        st.one_of(st.tuples(st.just("request"), st.integers(0, 3)), st.tuples(st.just("batch"), st.integers(1, 4)))
    )
)
def test_a_batch_waits_unless_eight_before_it_were_alone(events: list[tuple[str, int]]) -> None:
    delay, lone = BatchDelay(0.5), 0
    for kind, count in events:
        if kind == "request":
            delay.on_request(count)
            lone = 0 if count else lone
        else:
            delay.on_batch(count)
            lone = lone + 1 if count == 1 else 0
        assert delay.seconds == (0.0 if lone >= 8 else 0.5)


def test_whatever_waits_behind_a_call_that_takes_too_long_is_refused() -> None:
    slow, shown = Slow(), []
    slow.record = lambda kind, name, value, labels: shown.append(value)
    slow.delay = 0.05
    # The second is of another protocol, so it is held for a call of its own.
    requests = [Request({"body": ""}), Request({"body": ""}, envelope="json"), Request({"body": ""})]

    async def all_of_them() -> list[Response]:
        batcher = Batcher(slow)  # type: ignore[arg-type]

        async def one(each: Request) -> Response:
            (piece,) = [piece async for piece in batcher.submit(each)]
            return piece

        return list(await asyncio.wait_for(asyncio.gather(*map(one, requests)), 3))

    assert [answer.status for answer in asyncio.run(all_of_them())] == [503, 503, 503]
    assert shown[-1] == 0
    slow.release.set()


def test_a_call_that_begins_late_is_watched() -> None:
    slow = Slow()
    # It is over after the first look, which sees neither a call nor one that waits.
    slow.delay = 2 * slow.timeout
    start = time.monotonic()

    async def alone() -> list[Response]:
        pieces = Batcher(slow).submit(Request({"body": ""}))  # type: ignore[arg-type]
        return [piece async for piece in pieces]

    (answer,) = asyncio.run(asyncio.wait_for(alone(), 3))
    assert answer.status == 503 and time.monotonic() - start < 1.5
    slow.release.set()


def test_pieces_come_in_order_before_the_last() -> None:
    slow = Slow()

    def answer(requests: Sequence[Request]) -> list[Response]:
        for number in range(50):
            for request in requests:
                request.send(Response(b"%d" % number, "text/plain"))
        return [Response(b"last", "text/plain")] * len(requests)

    slow.answer = answer  # type: ignore[method-assign]

    async def both() -> list[list[bytes]]:
        batcher = Batcher(slow)  # type: ignore[arg-type]
        requests = [Request({"body": ""}) for _ in range(2)]

        async def one(each: Request) -> list[bytes]:
            return [piece.body async for piece in batcher.submit(each)]

        return list(await asyncio.gather(*map(one, requests)))

    assert asyncio.run(both()) == [[*(b"%d" % number for number in range(50)), b"last"]] * 2


def test_without_torchserve(packed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, packed], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("answered: 200"))
    answer = torch.tensor(json.loads(line.removeprefix("answered: 200")))
    torch.testing.assert_close(answer, expected([ROW]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_handler_that_derives_from_torchserve_s_needs_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = CONFIG.replace("warmup:", "wrap: own.py, warmup:")
    made = archive(tmp_path, "wrapped", "tensor", config, "--extra-files", tmp_path / "own.py")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, made], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "It needs TorchServe: pip install torchserve." in done.stderr
    allowed = BLOCKED.replace('sys.modules["ts"] = None', "").replace("assert not", "assert")
    done = subprocess.run(
        [sys.executable, "-c", allowed, made], check=False, capture_output=True, text=True, timeout=300
    )
    assert "answered: 200" in done.stdout, done.stderr


def test_an_archive_of_torchserve_s_own_handler_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(NETWORK)
    command = ["model_archiver.model_packaging", "--model-name", "theirs", "--version", "1", "--handler"]
    command += ["image_classifier", "--model-file", str(tmp_path / "m.py"), "--export-path", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    with pytest.raises(ModelLoadError, match="handler.openvino.wrap: image_classifier"):
        ArchiveService(tmp_path / "theirs.mar", lambda *_: None)


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "no.mar").write_bytes(b"no")
    for read in (ModelSettings.of, lambda path: ArchiveService(path, lambda *_: None)):
        with pytest.raises(PackagingError, match="cannot be read as a .mar"):
            read(tmp_path / "no.mar")


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        (b'{"a": 1}', "application/json; charset=utf-8", {"a": 1}),
        ("é".encode(), "text/plain", "é"),
        (b"\xff\xd8", "image/jpeg", bytearray(b"\xff\xd8")),
        (b"", "", bytearray()),
    ],
)
def test_bodies_reach_the_handler_as_from_torchserve(body: bytes, kind: str, value: Any) -> None:
    assert row_of(body, kind, {"k": "3"}) == {"k": "3", "body": value}


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b"9" * 5000, "application/json", "thousands of digits"),
        (b"[" * 100_000, "application/json", "nested too deep"),
        (b"\xff", "application/json", "not UTF-8"),
        (b"\xff", "text/plain", "not valid text/plain"),
    ],
    ids=range(5),
)
def test_a_body_that_is_not_of_its_type(body: bytes, kind: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        row_of(body, kind, {})


def test_a_warm_worker_imports_nothing_that_traces_and_its_first_request_imports_nothing(tmp_path: Path) -> None:
    packaged = archive(tmp_path, "warm", "tensor", CONFIG, "--precompile")
    done = subprocess.run([sys.executable, "-c", WARM, packaged], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["tracing: []", "first request: []"]


def test_pieces_reach_their_own_client_though_two_have_one_id() -> None:
    got: dict[str, list[bytes]] = {"a": [], "b": []}
    requests = [
        Request({"body": name}, id="42", send=lambda piece, name=name: got[name].append(piece.body)) for name in got
    ]
    context = Context({}, "", {}, 2, None).for_requests(requests)
    ids = context.request_ids
    assert ids is not None and len(set(ids.values())) == 2 and ids[0] == "42"
    for name, text in ((0, "first"), (1, "second")):
        message = create_predict_response([text], {0: ids[name]}, "", 200, context)
        context.cl_socket.sendall(message)
    assert got == {"a": [b"first"], "b": [b"second"]}


@pytest.mark.parametrize("keeps_idle", [True, False])
def test_a_host_that_starts_workers_again_says_that_they_do_not_end(tmp_path: Path, keeps_idle: bool) -> None:
    path = archive(tmp_path, "idle", config=CONFIG.replace("{openvino: {", "{openvino: {keep: 10m, "))
    folders = list(sys.path)
    try:
        made = ArchiveService(path, lambda *_: None, workers=1, keeps_idle=keeps_idle)
    finally:
        sys.path[:] = folders
    assert ("keep has no effect" in str(made.describe()["notes"])) == keeps_idle


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_panic_is_one_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    slow.release.set()
    counted: Counter[int] = Counter()

    def refused(error: ItemError, name: str, form: Any) -> Response:
        counted[error.status] += 1
        return Response.refused(error, name, form)

    monkeypatch.setattr(slow, "refused", refused, raising=False)
    right = slow.answer

    def answer(requests: Sequence[Request]) -> list[Response]:
        if requests[0].row["body"] == "panic":
            raise Panic
        return right(requests)

    monkeypatch.setattr(slow, "answer", answer)

    async def one_after_another() -> list[Response]:
        batcher = Batcher(slow)  # type: ignore[arg-type]
        return [piece for body in ("panic", "") async for piece in batcher.submit(Request({"body": body}))]

    assert [answer.status for answer in asyncio.run(one_after_another())] == [500, 200]
    assert counted == {500: 1}


class Joins:
    """Answers requests that join others: in pieces, in one, or never."""

    name, batch_size, delay, timeout, awaits = "joins", 1, 0.0, 0.3, True

    def __init__(self) -> None:
        self.ended, self.gone = "", False
        self.record = lambda *_: None
        self.refused = Response.refused

    async def answer_alone(self, request: Request) -> Response:
        if request.row["body"] == "panic":
            raise Panic
        for _ in range(5):
            await asyncio.sleep(0.15)
            if request.row["body"] == "pieces":
                request.send(Response(b"p", "text/plain"))
            self.gone |= request.is_gone()
        while request.row["body"] == "hangs":
            await asyncio.sleep(0.05)
        return Response(b"end", "text/plain")


@pytest.mark.parametrize(
    ("body", "statuses", "ended"),
    [("pieces", [200] * 6, ""), ("late", [503], ""), ("hangs", [503], "responseTimeout"), ("panic", [500], "")],
)
def test_requests_that_join_others_have_a_time_limit_between_pieces(
    monkeypatch: pytest.MonkeyPatch, body: str, statuses: list[int], ended: str
) -> None:
    monkeypatch.setattr(batcher, "_GRACE_SECONDS", 1.0)
    joins = Joins()

    async def pieces() -> list[Response]:
        joined = Batcher(joins)  # type: ignore[arg-type]
        got = [piece async for piece in joined.submit(Request({"body": body}))]
        await asyncio.sleep(1.5 if body == "hangs" else 0.8)
        return got

    assert [piece.status for piece in asyncio.run(pieces())] == statuses
    assert joins.gone is (body in {"late", "hangs"}) and ended in joins.ended and bool(ended) is bool(joins.ended)
