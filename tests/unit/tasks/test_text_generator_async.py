"""TorchServe's `asyncCommunication: true`: requests in flight together, each with an end of its own."""

import concurrent.futures
import json
import re
from pathlib import Path
from types import SimpleNamespace

from talker import COMPLETION, DESCRIBE, Frontend, Talker
from ts.torch_handler.request_envelope.json import JSONEnvelope

from chat_models import eager_tokens, text_of
from torchserve_openvino.bench.bodies import read_folder


def test_requests_run_together_and_a_bad_one_fails_alone(folder: Path, tmp_path: Path) -> None:
    talker = Talker(tmp_path / "archive", folder, asyncCommunication=True, batchSize=1)
    try:
        frontend = Frontend(talker)
        good = json.dumps({"prompt": "Hello", "max_tokens": 8}).encode()
        stream = json.dumps({"prompt": "Hello", "max_tokens": 8, "temperature": 0, "stream": True}).encode()
        ends = frontend.ask_all([
            ("", good), ("", b'{"prompt": ""}'), (COMPLETION, stream), (COMPLETION, b"{"), ("", b'{"prompt": 7}'),
            ("", good),
        ])  # fmt: skip
        # TorchServe answers all requests in flight with the status of a message that is not 200.
        assert all(int.from_bytes(end[:4], "big") == 200 for end in ends)
        assert all(b"ts_stream_next" in end and b"false" in end for end in ends)
        text = text_of(eager_tokens(folder, "Hello", 8))
        whole = frontend.received(lambda got: got.count(json.dumps(text).encode()) == 2 and b"[DONE]" in got)
        assert whole.count(b"Bad Request") >= 3
        pieces = re.findall(rb"data: (\{.*?\})\n\n", whole)
        assert "".join(json.loads(each)["choices"][0]["text"] for each in pieces) == text
        assert talker.handler.counters.to_dict()["refused_400"] == 3
        times = talker.handler.describe_handle()["serving"]["times"]
        assert times["seconds"]["decode"]["count"] == times["batch_size"]["count"] == 6
        assert times["seconds"]["inference"]["count"] == 3
    finally:
        talker.close()


def test_a_description_ends_its_request(folder: Path, tmp_path: Path) -> None:
    """TorchServe would keep it, and answer it again when the worker ends: into whatever its connection is used for."""
    talker = Talker(tmp_path / "archive", folder, asyncCommunication=True, batchSize=1)
    try:
        (end,) = Frontend.ends(talker, [(DESCRIBE, b"")])
        assert b"ts_stream_next" in end and b"false" in end
        assert json.loads(end[end.index(b"{") : end.rindex(b"}") + 1])["generate"]["frontend"] in {"faulty", "patched"}
    finally:
        talker.close()


def test_an_envelope_is_awaited_too(folder: Path, tmp_path: Path) -> None:
    talker = Talker(tmp_path / "archive", folder, asyncCommunication=True, batchSize=1)
    try:
        bodies = [
            b'{"instances": [{"prompt": "Hello", "max_tokens": 4}, {"prompt": ""}]}',
            b"{",
            b'{"instances": [{}]}',
        ]
        ends = Frontend.ends(talker, [("", body) for body in bodies], JSONEnvelope(talker.handler.handle).handle)
        assert all(int.from_bytes(end[:4], "big") == 200 and b"false" in end for end in ends)
        got = talker.streamed()
        answers = [json.loads(each)["predictions"] for each in re.findall(rb'{"predictions": .*?]}', got)]
        (found,) = [each for each in answers if len(each) == 2]
        assert found[0]["text"] == text_of(eager_tokens(folder, "Hello", 4)) and found[1]["code"] == 400
        assert got.count(b"Bad Request") == 2 and b"Multi-Status" in got
    finally:
        talker.close()


def test_long_messages_of_several_threads_do_not_mix(folder: Path, tmp_path: Path) -> None:
    talker = Talker(tmp_path / "archive", folder, asyncCommunication=True, batchSize=1)
    try:
        from torchserve_openvino.serving.torchserve.asynchronous import keep_messages_whole

        keep_messages_whole(SimpleNamespace(cl_socket=talker.mine))
        messages = [bytes([65 + number]) * 1_000_000 for number in range(8)]
        got = bytearray()

        def read() -> None:
            while len(got) < sum(map(len, messages)):
                got.extend(talker.theirs.recv(1 << 16))

        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            reading = pool.submit(read)
            list(pool.map(talker.mine.sendall, messages))
            reading.result()
        assert sorted(re.findall(rb"(.)\1*", bytes(got))) == [bytes([65 + number]) for number in range(8)]
    finally:
        talker.close()


def test_answered_requests_are_recorded(folder: Path, tmp_path: Path) -> None:
    section = {"record": {"folder": str(tmp_path / "kept"), "every": 1}}
    talker = Talker(
        tmp_path / "archive", folder, asyncCommunication=True, batchSize=1, handler={"openvino": section}
    )  # fmt: skip
    try:
        good = {"prompt": "Hello", "max_tokens": 4}
        Frontend(talker).ask_all([("", json.dumps(good).encode()), ("", b'{"prompt": ""}')])
        talker.handler._openvino.recorder.close()
        (body,) = read_folder(tmp_path / "kept")
        assert json.loads(body.data) == good
    finally:
        talker.close()
