"""The option ``verify: first``: each new graph's first call is compared with eager PyTorch, once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import leave_unwritten
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.errors import ConfigError, VerificationError

BACKENDS = ("openvino", "openvino_ts", "export")
OPTIONS = {"verify": "first", "min_partition_us": 0}


class Net(nn.Module):
    """Returns two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": torch.softmax(self.linear(x), 1), "sum": x.sum(1)}


def verify(compiled: Any) -> tuple[int, int]:
    entry = compiled.report.to_dict()["verify"]
    return entry["compared"], entry["mismatches"]


def falsify(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Adds to each result of OpenVINO."""
    right = CompiledPartition.run
    monkeypatch.setattr(CompiledPartition, "run", lambda self, args: [each + by for each in right(self, args)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_new_graph_is_compared_once(backend: str) -> None:
    model = Net().eval()
    runs: list[int] = []
    compiled = tov.compile(model, backend=backend, options=OPTIONS)
    real = model.forward
    with torch.no_grad():
        for rows in (2, 2, 3, 3, 2):
            compiled(torch.randn(rows, 4))
            runs.append(verify(compiled)[0])
        assert runs == [1, 1, 2, 2, 2]
        # Other weights are another variant of the graph.
        model.linear.weight.mul_(2)
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), real(x))
    assert verify(compiled) == (3, 0)
    entry = compiled.report.to_dict()["verify"]
    assert entry["passed"] and entry["against"] == "eager" and 0 <= entry["worst"] < 1e-5
    assert compiled.report.fallback_counts() == {}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_result_is_an_error_at_each_call(backend: str, freeze: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, 0.5)
    compiled = tov.compile(Net().eval(), backend=backend, options=OPTIONS)
    if freeze:
        compiled.freeze()
    with torch.no_grad():
        for count in (1, 2, 3):
            with pytest.raises(VerificationError, match=r"output 0 differs by 0.5, more than .*bisect"):
                compiled(torch.randn(2, 4))
            assert verify(compiled) == (count, count)
    assert compiled.report.to_dict()["verify"]["worst"] == pytest.approx(0.5)
    assert not compiled.report.verified


def test_without_the_option_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, 0.5)
    compiled = tov.compile(Net().eval(), options={"min_partition_us": 0})
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    assert "compared" not in compiled.report.to_dict()["verify"]


def test_memory_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unwritten(monkeypatch)
    compiled = tov.compile(Net().eval(), options=OPTIONS)
    with torch.no_grad(), pytest.raises(VerificationError):
        compiled(torch.full((2, 4), 7.0))


class Cached(nn.Module):
    """Writes to a buffer, so that it can't run again on the same state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return torch.tanh(self.total) + x


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_a_graph_that_writes_is_compared_by_itself(backend: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong:
        falsify(monkeypatch, 0.5)
    model, twin, x = Cached().eval(), Cached().eval(), torch.ones(2, 4)
    compiled = tov.compile(model, backend=backend, options=OPTIONS)
    with torch.no_grad():
        if wrong:
            with pytest.raises(VerificationError, match="graph 0"):
                compiled(x)
            return
        for _ in range(3):
            torch.testing.assert_close(compiled(x), twin(x))
            torch.testing.assert_close(model.total, twin.total)
    assert verify(compiled) == (1, 0)


def test_gradients_are_compared_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).train()
    compiled = tov.compile(model, options=OPTIONS)
    x = torch.randn(2, 4, requires_grad=True)
    compiled(x).sum().backward()
    ours, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(ours, x.grad)
    # The forward graph with the call, and the backward graph by itself.
    assert verify(compiled) == (2, 0)


def test_random_numbers_are_the_same_and_not_used_up_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    compiled, x = tov.compile(model, options=OPTIONS), torch.ones(2, 4)
    with torch.no_grad():
        torch.manual_seed(3)
        results = [compiled(x), compiled(x)]
        torch.manual_seed(3)
        torch.testing.assert_close(results, [model(x), model(x)])
    assert verify(compiled) == (1, 0)


def test_a_call_in_several_graphs_is_compared_as_a_whole() -> None:
    def breaks(x: Tensor) -> Tensor:
        y = torch.softmax(x, 1)
        torch._dynamo.graph_break()
        return torch.tanh(y) + 1

    compiled, x = tov.compile(breaks, options=OPTIONS), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), breaks(x))
    assert verify(compiled) == (1, 0)


def test_a_call_that_openvino_fails_on_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = Net().eval(), CompiledPartition.run
    compiled, x = tov.compile(model, options=OPTIONS), torch.randn(2, 4)

    def fail(self: Any, args: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CompiledPartition, "run", fail)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert "compared" not in compiled.report.to_dict()["verify"]
        monkeypatch.setattr(CompiledPartition, "run", right)
        torch.testing.assert_close(compiled(x), model(x))
    assert verify(compiled) == (1, 0)


def test_a_frozen_model_is_compared_before_it_runs_without_guards() -> None:
    model, x = Net().eval(), torch.randn(2, 4)
    compiled = tov.compile(model, options=OPTIONS).freeze()
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.frozen == 1
    assert verify(compiled) == (1, 0)


def test_a_call_from_the_cache_is_compared_before_its_first_use(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(2, 4)
    options = {**OPTIONS, "model_caching": True, "cache_dir": str(tmp_path)}
    with torch.no_grad():
        for _ in range(2):
            compiled = tov.compile(model, options=options).freeze()
            for _ in range(3):
                torch.testing.assert_close(compiled(x), model(x))
            assert verify(compiled) == (1, 0)
    assert compiled.report.cache.call_hits == 1


def test_as_a_backend_of_torch_compile_each_graph_is_compared_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, 0.5)
    compiled = torch.compile(Net().eval(), backend="openvino_serving", options=OPTIONS)
    with torch.no_grad(), pytest.raises(VerificationError, match="graph 0"):
        compiled(torch.randn(2, 4))


@pytest.mark.parametrize("value", ["always", True, 1])
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="verify"):
        tov.compile(Net(), options={"verify": value})
