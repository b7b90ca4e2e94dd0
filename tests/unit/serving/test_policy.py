"""The policy at every call: a worker that violates it after READY reports that, and may refuse and exit."""

import logging

import pytest
import torch
from serving_worker import NETWORK, WARMUP, network, save_weights, sent

from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

ROW = [[0.5, -1.0, 2.0, 0.1]]


def started(archive, fallback, **arguments):
    made = archive(
        {"handler": {"openvino": {"warmup": WARMUP, "fallback": fallback}}}, weights=save_weights, **arguments
    )
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


def test_warn_answers_and_marks_the_worker(archive, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    made, handler = started(archive, {"allow": []})
    monkeypatch.setattr(CompiledPartition, "run", lambda self, args: (_ for _ in ()).throw(RuntimeError("gave up")))
    (answer,) = made.handle(handler, ROW)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(answer), network()(torch.tensor(ROW)))
    policy = handler.describe_handle()["serving"]["policy"]
    assert not policy["holds"] and "gave up" in policy["violations"][0]
    values = [value for value, _ in sent(caplog, "openvino_policy_violated")]
    assert values[0] == "0" and values[-1] == "1"


def test_refuse_answers_503_and_ends_the_worker_at_the_next_request(archive, monkeypatch, sockets) -> None:
    made, handler = started(archive, {"allow": [], "on_violation": "refuse"})
    made.context.cl_socket, frontend = sockets
    assert made.handle(handler, ROW) and made.status(0) == 200
    monkeypatch.setattr(CompiledPartition, "run", lambda self, args: (_ for _ in ()).throw(RuntimeError("gave up")))
    (answer,) = made.handle(handler, ROW)
    assert made.status(0) == 503 and answer["type"] == "ForbiddenFallbackError"
    made.context.cl_socket.sendall(b"the answer still goes out")
    with pytest.raises(SystemExit):
        made.handle(handler, ROW)
    frontend.settimeout(5)
    assert frontend.recv(100) == b"the answer still goes out" and frontend.recv(1) == b""


def test_an_allowed_fallback_is_no_violation(archive, monkeypatch) -> None:
    made, handler = started(archive, {"allow": ["runtime_failed"], "on_violation": "refuse"})
    monkeypatch.setattr(CompiledPartition, "run", lambda self, args: (_ for _ in ()).throw(RuntimeError("gave up")))
    assert made.handle(handler, ROW) and made.status(0) == 200
    assert handler.describe_handle()["serving"]["policy"]["holds"]


INTEGERS = NETWORK.replace("def forward(self, x):", "def forward(self, x):\n        return x + x + x + x")


def test_a_request_whose_own_values_fall_back_is_refused_alone(archive, sockets) -> None:
    section = {
        "warmup": {"inputs": [{"shape": [2], "dtype": "int64"}]},
        "fallback": {"allow": [], "on_violation": "refuse"},
    }
    made = archive({"handler": {"openvino": section}}, model_file=INTEGERS, weights=save_weights, batch_size=3)
    handler = TensorHandler()
    handler.initialize(made.context)
    ours, _ = sockets
    made.context.cl_socket = ours
    answers = made.handle(handler, [[1, 2]], [[2**40, 1]], [[3, 4]])
    assert [made.status(i) for i in range(3)] == [200, 422, 200]
    assert answers[0] == [[4, 8]] and answers[2] == [[12, 16]]
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)


LONGER = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return torch.digamma(x + 3) * self.scale if x.shape[1] > 4 else x * self.scale
"""


def test_a_graph_that_another_worker_stored_is_refused_at_each_call_and_counted(archive, tmp_path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    section = {
        "warmup": WARMUP, "freeze": True, "batching": {"outside": "compile"},
        "fallback": {"allow": [], "on_violation": "refuse"},
    }  # fmt: skip
    yaml = {"pt2": {"compile": {"backend": "openvino", "options": options}}, "handler": {"openvino": section}}
    for _ in range(2):
        made = archive(yaml, model_file=LONGER, weights=lambda path: torch.save({"scale": torch.ones(1)}, path))
        handler = TensorHandler()
        handler.initialize(made.context)
        for _ in range(3):
            made.handle(handler, [[0.5, -1.0, 2.0, 0.1, 0.3]])
            assert made.status(0) == 503
        assert made.handle(handler, ROW) and made.status(0) == 200


def fails(self, args):
    raise RuntimeError("gave up")


def test_a_worker_whose_openvino_recovers_is_ready_again(archive, monkeypatch) -> None:
    made, handler = started(archive, {"allow": [], "on_violation": "refuse"})
    health = worker_of(handler).health
    with monkeypatch.context() as patch:
        patch.setattr(CompiledPartition, "run", fails)
        made.handle(handler, ROW)
        assert made.status(0) == 503
    assert health.check()["healthy"] and not handler.describe_handle()["serving"]["policy"]["holds"]
    assert made.handle(handler, ROW) and made.status(0) == 200


def test_a_probe_ends_a_worker_whose_openvino_goes_on_failing(archive, monkeypatch) -> None:
    """Where probes keep requests away, no second batch would."""
    made, handler = started(archive, {"allow": [], "on_violation": "refuse"})
    worker = worker_of(handler)
    monkeypatch.setattr(CompiledPartition, "run", fails)
    made.handle(handler, ROW)
    assert made.status(0) == 503
    state = worker.health.check()
    assert not state["healthy"] and "falls back" in state["reason"]
    with pytest.raises(SystemExit):
        made.handle_with(handler, [b"{}"], [{"explain": "False", "openvino-health": "1"}])


def test_with_warn_a_worker_is_ready_once_openvino_answers_again(archive, monkeypatch) -> None:
    made, handler = started(archive, {"allow": []})
    health = worker_of(handler).health
    with monkeypatch.context() as patch:
        patch.setattr(CompiledPartition, "run", fails)
        made.handle(handler, ROW)
        assert not health.check()["healthy"]
    assert health.check()["healthy"]
