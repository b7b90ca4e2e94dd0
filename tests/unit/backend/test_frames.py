"""Every frame that Dynamo runs in eager is counted at each call, with its reason, for the model it belongs to."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend import compiler


def total(compiled: tov.CompiledModule) -> int:
    return sum(compiled.report.fallback_counts().values())


def agrees(compiled: tov.CompiledModule) -> None:
    """Asserts that summary, list and text report the same number of graph breaks."""
    report = compiled.report.to_dict()
    listed = sum(each["count"] for each in report["graph_breaks"])
    assert report["summary"]["graph_breaks"] == listed == compiled.report.fallback_counts().get("graph_break", 0)
    assert f"graph breaks {listed}" in compiled.report.summary_line()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(y).repeat(1, k)


def test_calls_beyond_the_recompile_limit_behind_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "RECOMPILE_LIMIT", 3)
    model = Halves().eval()
    compiled = tov.compile(model)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        for k in range(1, 5):
            compiled(x, k)
        for k in range(5, 15):
            before = total(compiled)
            assert_same(compiled(x, k), model(x, k))
            assert total(compiled) == before + 1
        before = total(compiled)
        assert_same(compiled(x, 2), model(x, 2))
        assert total(compiled) == before
    assert compiled.report.summary.coverage < 1.0
    assert sum(compiled.report.to_dict()["outside"].values()) == 1
    (limit,) = (f for f in compiled.report.fallbacks if "recompile limit" in f.reason)
    assert limit.count >= 10 and __file__ in limit.op
    agrees(compiled)


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.sin(x)
        torch._dynamo.graph_break()
    return torch.cos(x)


def test_a_frame_that_dynamo_gives_up() -> None:
    compiled = tov.compile(in_a_loop)
    with torch.no_grad():
        for n in range(1, 5):
            x = torch.randn(3)
            assert_same(compiled(x), in_a_loop(x))
            assert total(compiled) == n
    assert compiled.report.summary.coverage == 0.0
    report = compiled.report.to_dict()
    assert report["outside"] == {"aten.sin.default": 2, "aten.cos.default": 1}
    assert report["graph_breaks"][0]["where"].startswith(__file__)
    assert "outside any graph" in compiled.report.to_text()
    agrees(compiled)


def test_after_a_reset_dynamo_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "RECOMPILE_LIMIT", 2)
    compiled = tov.compile(lambda x: torch.sin(x) + 1)
    with torch.no_grad():
        for n in (2, 3, 4, 5):
            compiled(torch.ones(n))
        before = total(compiled)
        torch.compiler.reset()
        compiled(torch.ones(5))
    assert total(compiled) == before == 2


class Crnn(nn.Module):
    """Has a submodule that Dynamo may not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(4, 4, 1), nn.Linear(4, 2)
        self.rest = torch.compiler.disable(nn.Linear(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rest(self.conv(x).relu()))


def test_operators_outside_any_graph_are_no_coverage() -> None:
    model = Crnn().eval()
    compiled = tov.compile(model)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(1, 4, 3)
            assert_same(compiled(x), model(x))
    summary = compiled.report.summary
    assert 0 < summary.coverage < 1 and sum(compiled.report.to_dict()["outside"].values()) == 1
    agrees(compiled)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_covered_or_told(kind: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.layer, self.last = nn.Conv1d(4, 4, 1), kind(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layer(self.conv(x).relu())[0])

    model = Net().eval()
    compiled = tov.compile(model)
    with torch.inference_mode():
        for n in (1, 2):
            x = torch.randn(1, 4, 3)
            assert_same(compiled(x), model(x))
            told = total(compiled)
            assert (compiled.report.summary.coverage == 1.0) == (told == 0)
            assert not told or told >= n
    agrees(compiled)


def test_quantized_modules_are_told() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval())
    compiled = tov.compile(model)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        assert_same(compiled(x), model(x))
        assert_same(compiled(x), model(x))
    assert compiled.report.summary.coverage < 1.0 and total(compiled) > 0
    agrees(compiled)


def test_recompiles_belong_to_the_model_that_recompiled() -> None:
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(n + 1))).eval() for n in range(4)]
    compiled = [tov.compile(model) for model in models]
    errors = []

    def work(number: int) -> None:
        try:
            with torch.inference_mode():
                for batch in range(1, number + 2):
                    x = torch.randn(batch, 4)
                    assert_same(compiled[number](x), models[number](x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [each.report.summary.recompiles for each in compiled] == [0, 1, 2, 3]
    assert [each.report.summary.graphs for each in compiled] == [1, 2, 3, 4]


# --- failures during capture and lowering -------------------------------------------------------------------------


class Assigning(nn.Module):
    """AOTAutograd raises on the assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.9
        return self.linear(x)


def test_what_can_not_be_lowered_runs_once_in_eager() -> None:
    model, twin = Assigning().eval(), Assigning().eval()
    twin.load_state_dict(model.state_dict())
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for n in range(1, 4):
            x = torch.randn(2, 4)
            assert_same(compiled(x), twin(x))
            assert_same(model.linear.weight, twin.linear.weight)
            assert compiled.report.fallback_counts()["conversion_failed"] == n
    assert "set_" in compiled.report.fallbacks[0].reason and compiled.frozen == 0


def test_only_the_frame_that_failed_runs_in_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchserve_openvino.backend.capture import graph

    real = graph.CompiledGraph

    def failing(lowered: Any, *rest: Any) -> Any:
        if any("erf" in str(node.target) for node in lowered.gm.graph.nodes):
            raise ValueError("the stage is closed")
        return real(lowered, *rest)

    monkeypatch.setattr(graph, "CompiledGraph", failing)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        print("once")
        return torch.erf(y) + 1

    compiled = tov.compile(model)
    with torch.no_grad():
        for n in range(1, 4):
            x = torch.randn(3)
            got = compiled(x)
            assert capsys.readouterr().out == "once\n"
            assert_same(got, torch.erf(torch.sin(x)) + 1)
            assert compiled.report.fallback_counts()["conversion_failed"] == n
    assert compiled.report.summary.graphs == 1 and 0 < compiled.report.summary.coverage < 1
    assert any("the stage is closed" in fallback.reason for fallback in compiled.report.fallbacks)


def test_a_graph_that_can_not_be_built_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchserve_openvino.backend.capture import builder

    def failing(*args: Any) -> Any:
        raise ValueError("the stage is closed")

    monkeypatch.setattr(builder, "assemble", failing)
    model = nn.Linear(4, 4).eval()
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            assert_same(compiled(x), model(x))
    assert compiled.report.fallback_counts() == {"conversion_failed": 3}
    assert compiled.report.summary.coverage == 0.0


def test_the_callers_own_error_is_eagers() -> None:
    model = nn.Linear(4, 4).eval()
    compiled = tov.compile(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError) as raised:
            model(torch.randn(2, 5))
        with pytest.raises(RuntimeError, match=str(raised.value).split("(")[0]):
            compiled(torch.randn(2, 5))
        x = torch.randn(2, 4)
        assert_same(compiled(x), model(x))


def test_fullgraph_raises() -> None:
    with torch.no_grad():
        with pytest.raises(Exception, match="set_"):
            tov.compile(Assigning().eval(), fullgraph=True)(torch.randn(2, 4))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            tov.compile(in_a_loop, fullgraph=True)(torch.randn(2))


@pytest.mark.parametrize("whose", ["ours", "AOTAutograd's"])
def test_modes_of_several_threads_leave_no_flag_of_the_process_behind(whose: str) -> None:
    """Entering a mode the way torch does sets process-wide flags; left set, Dynamo skips every later frame."""
    from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    from torchserve_openvino.backend.upstream._torch_modes import OperatorCount

    tov.compile(lambda x: x + 1)(torch.zeros(2))
    modes = [OperatorCount(lambda op: None) if whose == "ours" else _AnalyzeCustomOpInputOutputMode() for _ in range(2)]
    entered = [threading.Event() for _ in modes]
    left = threading.Event()
    errors = []

    def first() -> None:
        with modes[0]:
            entered[0].set()
            assert entered[1].wait(10)
        left.set()

    def second() -> None:
        assert entered[0].wait(10)
        with modes[1]:
            entered[1].set()
            assert left.wait(10)

    def work(each: Callable[[], None]) -> None:
        try:
            each()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(event.is_set() for event in (*entered, left))
    assert not is_in_torch_dispatch_mode()


@torch.compiler.disable
def by_length(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.shape[0] == 2 else x.cos()


def test_operators_outside_that_a_new_shape_brings_are_counted_when_it_comes_again() -> None:
    compiled = tov.compile(lambda x: by_length(x * 2) + 1, dynamic=False)
    with torch.no_grad():
        for length in (2, 2, 3, 2, 3):
            compiled(torch.ones(length))
    assert compiled.report.to_dict()["outside"] == {"aten.sin.default": 1, "aten.cos.default": 1}
