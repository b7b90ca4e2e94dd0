"""Whose fault a failed request is: what eager PyTorch rejects is the client's, in answers, counts and the policy."""

from typing import Any

import pytest
import torch
from own_handlers import BODY, OTHER, NoGrad, Parts, Plain, eager_answer, start
from serving_worker import NETWORK, WARMUP, save_weights

import torchserve_openvino as tov
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler
from versions import TORCH

REFUSE = {"allow": [], "on_violation": "refuse"}
MALFORMED = b"1.0,2.0"
# torch 2.15 names the operator first.
REJECTION = "addmm: mat1 and mat2" if TORCH >= (2, 15) else "mat1 and mat2"
POLICIES: dict[str, dict[str, Any]] = {
    "default": {}, "none allowed": REFUSE, "coverage": {"min_coverage": 0.9, "on_violation": "refuse"},
}  # fmt: skip


class OwnNetwork(Plain):
    """Counts on eager PyTorch's own error."""

    def inference(self, data, *args, **kwargs):
        try:
            with torch.no_grad():
                return self.model(data)
        except RuntimeError as error:
            raise ValueError("my own message") from error


@pytest.mark.quick("none allowed-NoGrad", "coverage-Parts", "default-OwnNetwork")
@pytest.mark.parametrize("kind", [NoGrad, Parts, OwnNetwork])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_malformed_request_is_answered_alone_and_leaves_no_trace(archive, policy, kind) -> None:
    made, handler = start(archive, kind, batch_size=2, fallback=POLICIES[policy])
    before = handler.describe_handle()
    for bodies in ([BODY], [MALFORMED], [OTHER], [MALFORMED, BODY], [MALFORMED, MALFORMED], [BODY, OTHER]):
        answers = made.handle(handler, *bodies)
        for place, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
            if body is MALFORMED:
                assert made.status(place) == 400 and f"does not take this input: {REJECTION}" in answer["message"]
            else:
                assert made.status(place) == 200
                expected = eager_answer(kind, handler, body)[0]
                torch.testing.assert_close(torch.tensor(answer), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    after = handler.describe_handle()
    for name in ("fallbacks", "graph_breaks", "outside"):
        assert after[name] == before[name], name
    assert after["summary"]["coverage"] == before["summary"]["coverage"] == 1.0
    assert after["serving"]["policy"] == {"holds": True, "violations": []}
    assert after["serving"]["counts"]["refused_400"] == 4


BRANCHES = NETWORK.replace(
    "def forward(self, x):",
    "def forward(self, x):\n        if x.shape[-1] == 5:\n            torch._dynamo.graph_break()\n"
    "            x = x[:, :4] + 1",
)


@pytest.mark.parametrize("policy", ["none allowed", "coverage"])
def test_a_request_whose_shape_falls_back_is_refused_each_time_and_nobody_else(archive, sockets, policy) -> None:
    section, model = POLICIES[policy], BRANCHES
    if policy == "coverage":
        section = {**section, "min_coverage": 0.97}
        # OpenVINO has no conversion for `igamma`.
        branch = "x = torch.igamma(x[:, :4].abs() + 1, x[:, 1:].abs())"
        model = BRANCHES.replace("x = x[:, :4] + 1", branch).replace("torch._dynamo.graph_break()", "pass")
    made, handler = start(archive, NoGrad, batch_size=2, model=model, save=save_weights, fallback=section)
    made.context.cl_socket, frontend = sockets
    five = BODY + b",2"
    for bodies in ([five], [BODY], [five, BODY], [five], [five], [BODY, OTHER]):
        answers = made.handle(handler, *bodies)
        for place, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
            if body is five:
                assert made.status(place) == 503 and answer["type"] == "ForbiddenFallbackError", answer
            else:
                assert made.status(place) == 200, answer
    assert not handler.describe_handle()["serving"]["policy"]["holds"]
    frontend.setblocking(False)
    with pytest.raises(BlockingIOError):
        frontend.recv(1)


def failing(monkeypatch: Any, fails: Any) -> None:
    run = CompiledPartition.run

    def maybe(self, args):
        if fails():
            raise RuntimeError("gave up")
        return run(self, args)

    monkeypatch.setattr(CompiledPartition, "run", maybe)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_worker_is_replaced_only_if_openvino_fails_again(archive, sockets, monkeypatch, lasting) -> None:
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "fallback": REFUSE}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    made.context.cl_socket, _ = sockets
    row, fails = [[0.5, -1.0, 2.0, 0.1]], [True]
    failing(monkeypatch, lambda: fails[0])
    made.handle(handler, row)
    assert made.status(0) == 503
    if lasting:
        with pytest.raises(SystemExit):
            made.handle(handler, row)
        return
    for broken in (False, True, False, False):
        fails[0] = broken
        made.handle(handler, row)
        assert made.status(0) == (503 if broken else 200)
    assert not worker_of(handler).state.watch.replace


def test_neighbors_of_a_failing_call_keep_the_worker(archive, sockets, monkeypatch) -> None:
    made, handler = start(archive, NoGrad, batch_size=2, fallback=REFUSE)
    made.context.cl_socket, _ = sockets
    poison = float(OTHER.split(b",")[0])
    run = CompiledPartition.run

    def maybe(self, args):
        if any(torch.is_tensor(a) and a.dim() == 2 and bool((a[:, 0] == poison).any()) for a in args):
            raise RuntimeError("gave up")
        return run(self, args)

    monkeypatch.setattr(CompiledPartition, "run", maybe)
    for _ in range(4):
        made.handle(handler, OTHER, BODY)
        assert (made.status(0), made.status(1)) == (503, 200)


def test_what_a_failed_call_computed_outside_is_no_fallback(archive) -> None:
    class Outside(Plain):
        """Computes by itself on one branch only."""

        def inference(self, data, *args, **kwargs):
            with torch.no_grad():
                hidden = self.model(data)
                return self.model.twice(data.repeat(1, 2)) if float(data[0, 0]) > 5 else hidden

    made, handler = start(archive, Outside, fallback=REFUSE)
    made.handle(handler, b"9,0,0,0")
    assert made.status(0) == 500 and not handler.describe_handle()["fallbacks"]
    made.handle(handler, BODY)
    assert made.status(0) == 200


def test_requests_cannot_fill_the_report(archive) -> None:
    source = NETWORK.replace("def forward(self, x):", "def forward(self, x):\n        return x + x + x + x")
    section = {"warmup": {"inputs": [{"shape": [2], "dtype": "int64"}]}, "fallback": REFUSE}
    made = archive({"handler": {"openvino": section}}, model_file=source, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    for number in range(60):
        made.handle(handler, [[2**40 + number, 1]])
        assert made.status(0) == 422
    report = handler.describe_handle()
    assert len(report["fallbacks"]) <= 33 and sum(f["count"] for f in report["fallbacks"]) == 60
    # Whose client's fault it is, the worker keeps its policy, and is ready.
    assert report["serving"]["policy"] == {"holds": True, "violations": []}
    assert worker_of(handler).health.check()["healthy"]
    made.handle(handler, [[1, 2]])
    assert made.status(0) == 200


class Picky(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(ids).relu())


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_a_compiled_model_counts_no_call_that_eager_rejects(backend) -> None:
    from torchserve_openvino.backend.compiler import CompileSpec, compile_with

    compiled = tov.compile(Picky().eval()) if backend == "openvino" else compile_with(
        Picky().eval(), CompileSpec(backend=backend)
    )  # fmt: skip
    with torch.no_grad():
        compiled(torch.tensor([1, 2]))
        before = compiled.report.to_dict()
        for bad in (torch.tensor([7, 1]), torch.tensor([0.5, 1.5]), "text", torch.tensor([[1, 9]])):
            with pytest.raises((IndexError, RuntimeError, TypeError)):
                compiled(bad)
        after = compiled.report.to_dict()
    assert after["fallbacks"] == before["fallbacks"] and after["graph_breaks"] == before["graph_breaks"]
    assert after["summary"]["coverage"] == before["summary"]["coverage"]


@pytest.mark.parametrize("backend", ["openvino", "export"])
@pytest.mark.parametrize("bad", [torch.tensor([0.5, 1.5]), "text"], ids=["dtype", "kind"])
def test_a_first_call_that_eager_rejects_decides_nothing(backend, bad) -> None:
    from torchserve_openvino.backend.compiler import CompileSpec, compile_with

    model = Picky().eval()
    compiled = compile_with(model, CompileSpec(backend=backend))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises((IndexError, RuntimeError, TypeError)):
                compiled(bad)
        ids = torch.tensor([1, 2])
        torch.testing.assert_close(compiled(ids), model(ids))
    report = compiled.report.to_dict()
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] == report["graph_breaks"]


@pytest.mark.parametrize("scripted", [False, True], ids=["class", "TorchScript"])
@pytest.mark.parametrize("bad", [[[0.5, 1.0]], [[0, 1, 2, 3]]], ids=["shape", "integers"])
def test_a_first_request_that_eager_rejects_decides_nothing_for_a_model_without_declared_inputs(
    archive, bad, scripted
) -> None:
    def scripted_module(path) -> None:
        torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))).save(path)

    arguments = {"model_file": None, "weights": scripted_module} if scripted else {"weights": save_weights}
    made = archive({"handler": {"openvino": {}}}, batch_size=2, **arguments)
    handler = TensorHandler()
    handler.initialize(made.context)
    good = [[0.5, 1.0, -1.0, 2.0]]
    for bodies in ([bad], [bad, bad], [good], [good, bad], [good, good]):
        answers = made.handle(handler, *bodies)
        for place, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
            assert made.status(place) == (400 if body is bad else 200), answer
            if body is good:
                expected = worker_of(handler).eager_model(torch.tensor(good)).tolist()
                torch.testing.assert_close(torch.tensor(answer), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    report = handler.describe_handle()
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] == report["graph_breaks"]
    assert report["serving"]["shapes"]["joins_requests"] is True
