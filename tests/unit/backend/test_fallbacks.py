"""No fallback goes unreported: each cause is counted, with its reason and the user's line; results stay correct."""

import openvino as ov
import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, break_compilation, break_conversion_of_tanh, break_inference, check
from torchserve_openvino.backend import compiler
from torchserve_openvino.backend.backend_settings import cpp_compiler
from torchserve_openvino.errors import ConfigError

CAPABILITIES = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class Unsupported(nn.Module):
    """Has an unsupported operator in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.digamma(x + 2)  # the operator that OpenVINO lacks
        return torch.relu(self.second(x))


def test_unsupported_op_in_the_middle() -> None:
    compiled = tov.compile(Unsupported().eval())
    x = torch.randn(2, 6)
    with torch.no_grad():
        assert_same(compiled(x), compiled.eager(x))
    (fallback,) = compiled.report.to_dict()["fallbacks"]
    assert (fallback["kind"], fallback["op"], fallback["to"]) == (
        "unsupported_op",
        "aten.digamma.default",
        "eager",
    )
    assert "aten.digamma.default" in fallback["reason"]
    path, line = fallback["where"].rsplit(":", 1)
    with open(path, encoding="utf-8") as source:
        assert "the operator that OpenVINO lacks" in source.read().splitlines()[int(line) - 1]
    summary = compiled.report.summary
    assert summary.partitions == 2
    assert 0 < summary.coverage < 1 and summary.ops_on_openvino == summary.ops_total - 1


SPELLINGS = [
    "torch.ops.aten.relu.default",
    "aten.relu.default",
    "aten::relu",
    "aten.relu",
    "aten::relu.default",
    "torch.ops.aten.relu",
    torch.ops.aten.relu.default,
    torch.ops.aten.relu,
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@pytest.mark.parametrize("as_list", [True, False])
def test_disabled_ops_in_every_spelling(spelling: object, as_list: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    compiled = check(
        model,
        torch.randn(2, 4),
        options={"disabled_ops": [spelling] if as_list else spelling},
        coverage=None,
        fallbacks={"disabled_op": 1},
    )
    (fallback,) = compiled.report.to_dict()["fallbacks"]
    assert fallback["op"] == "aten.relu.default" and "disabled_ops" in fallback["reason"]


def test_disabled_op_that_would_be_decomposed_is_seen() -> None:
    check(
        lambda x, y: torch.addcmul(x, x, y) + 1,
        torch.randn(3),
        torch.randn(3),
        options={"disabled_ops": ["aten.addcmul"], "min_partition_us": 0},
        coverage=None,
        fallbacks={"disabled_op": 1},
    )


def test_decompositions_of_the_user() -> None:
    model = lambda x: torch.nn.functional.gelu(x)
    whole = check(model, torch.randn(3))
    split = check(model, torch.randn(3), options={"decompositions": ["aten.gelu"]})
    assert split.report.summary.ops_total > whole.report.summary.ops_total


def test_decomposition_that_torch_lacks() -> None:
    with pytest.raises(ConfigError, match="decomposition"):
        tov.compile(lambda x: x, options={"decompositions": ["aten.bincount"]})


def test_graph_break_has_the_users_line() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        if x.sum() > 0:  # data-dependent branch
            return x * 2
        return x - 1

    compiled = tov.compile(model)
    for sign in (1, -1):
        x = torch.full((3,), 0.5 * sign)
        assert_same(compiled(x), model(x))
    report = compiled.report.to_dict()
    assert report["summary"]["graph_breaks"] == 1
    path, line = report["graph_breaks"][0]["where"].rsplit(":", 1)
    with open(path, encoding="utf-8") as source:
        assert "data-dependent branch" in source.read().splitlines()[int(line) - 1]
    assert compiled.report.fallback_counts() == {"graph_break": 1}
    assert report["summary"]["coverage"] == 1.0


def test_a_break_before_the_first_operator_is_seen() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.sin(x) + 1

    compiled = tov.compile(model)
    assert_same(compiled(torch.ones(3)), model(torch.ones(3)))
    assert compiled.report.summary.graph_breaks == 1


def test_a_model_that_dynamo_skips_is_counted() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    compiled = tov.compile(model)
    with torch.compiler.set_stance("force_eager"):
        assert_same(compiled(torch.ones(3)), model(torch.ones(3)))
        assert_same(compiled(torch.ones(3)), model(torch.ones(3)))
    assert compiled.report.fallback_counts() == {"graph_break": 2}
    assert_same(compiled(torch.ones(3)), model(torch.ones(3)))
    assert compiled.report.fallback_counts() == {"graph_break": 2}


def test_shapes_beyond_the_recompile_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "RECOMPILE_LIMIT", 3)
    model = lambda x: torch.sin(x) + 1
    compiled = tov.compile(model)
    for n in range(2, 8):
        assert_same(compiled(torch.ones(n)), model(torch.ones(n)))
    counts = compiled.report.fallback_counts()
    assert counts["graph_break"] == 3, compiled.report.to_text()
    assert any("recompile limit" in f.reason for f in compiled.report.fallbacks)


def test_conversion_failure_is_local_and_has_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    break_conversion_of_tanh(monkeypatch)
    compiled = check(
        lambda x: torch.relu(torch.tanh(torch.sin(x)) + 1) * 2,
        torch.randn(5),
        coverage=0.8,
        fallbacks={"conversion_failed": 1},
        options={"min_partition_us": 0},
    )
    (fallback,) = compiled.report.to_dict()["fallbacks"]
    assert fallback["op"] == "aten.tanh.default" and "No conversion rule" in fallback["reason"]


def test_compile_failure_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compilation(monkeypatch)
    compiled = check(lambda x: torch.sin(x) * 2, torch.randn(5), coverage=0.0, fallbacks={"compile_failed": 1})
    (fallback,) = compiled.report.fallbacks
    assert "on strike" in fallback.reason and fallback.where.startswith(f"{__file__}:")


@pytest.mark.skipif(cpp_compiler() is None, reason="Inductor needs a C++ compiler")
def test_compile_failure_goes_to_inductor_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compilation(monkeypatch)
    compiled = check(
        lambda x: torch.sin(x) * 2,
        torch.randn(5),
        options={"fallback_to": "inductor"},
        coverage=0.0,
        fallbacks={"compile_failed": 1},
    )
    assert compiled.report.fallbacks[0].to == "inductor"
    assert compiled.report.to_dict()["graphs"][0]["partitions"][0]["runs_on"] == "inductor"


def test_inductor_without_a_compiler_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cpp_compiler", lambda: None)
    break_compilation(monkeypatch)
    compiled = check(
        lambda x: torch.sin(x) * 2,
        torch.randn(5),
        options={"fallback_to": "inductor"},
        coverage=0.0,
        fallbacks={"compile_failed": 1},
    )
    assert compiled.report.fallbacks[0].to == "eager"
    assert any("C++ compiler" in note for note in compiled.report.to_dict()["notes"])


def test_runtime_failure_is_counted_each_time_and_not_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lambda x: torch.sin(x) * 2
    x = torch.randn(5)
    compiled = tov.compile(model)
    compiled(x)
    with monkeypatch.context() as patch:
        break_inference(patch)
        assert_same(compiled(x), model(x))
        assert_same(compiled(x), model(x))
    assert compiled.report.fallback_counts() == {"runtime_failed": 2}
    (fallback,) = compiled.report.fallbacks
    assert "device is gone" in fallback.reason and fallback.where.startswith(f"{__file__}:")
    assert_same(compiled(x), model(x))
    assert compiled.report.fallback_counts() == {"runtime_failed": 2}


def test_other_backends_pass_through_and_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    compiled = tov.compile(model, backend="aot_eager")
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    report = compiled.report.to_dict()
    assert report["config"]["backend"] == "aot_eager"
    assert report["summary"]["coverage"] == 0.0 and report["summary"]["graphs"] == 1


def test_two_models_with_different_options_do_not_mix() -> None:
    first, second = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(),
    )
    x = torch.randn(2, 4)
    a = tov.compile(first, options={"disabled_ops": ["aten.relu"]})
    b = tov.compile(second, options={"config": {"INFERENCE_PRECISION_HINT": "bf16"}})
    with torch.no_grad():
        for _ in range(2):
            assert_same(a(x), first(x))
            torch.testing.assert_close(b(x), second(x), rtol=3e-2, atol=3e-2)
        is_exact = torch.allclose(b(x), second(x), rtol=1e-5, atol=1e-5)
    assert a.report.fallback_counts() == {"disabled_op": 1} and a.report.summary.precision == "f32"
    assert b.report.fallback_counts() == {}
    assert b.report.to_dict()["config"]["ov_config"]["INFERENCE_PRECISION_HINT"] == "bf16"
    # The precision in use. CPUs with AVX-512 that lack bf16 emulate it, so CAPABILITIES, the fast types, lack it too.
    assert b.report.summary.precision == ("f32" if is_exact else "bf16")
    assert not (is_exact and "BF16" in CAPABILITIES)


def test_registered_as_a_dynamo_backend() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    compiled = torch.compile(model, backend="openvino_serving", dynamic=False, options={"device": "CPU"})
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert_same(compiled(x), model(x))


def test_options_are_not_changed() -> None:
    options = {"device": "CPU", "disabled_ops": ["aten.relu"], "config": {"PERFORMANCE_HINT": "LATENCY"}}
    kept = {"device": "CPU", "disabled_ops": ["aten.relu"], "config": {"PERFORMANCE_HINT": "LATENCY"}}
    compiled = tov.compile(nn.ReLU(), options=options)
    compiled(torch.randn(2))
    assert options == kept


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("shape", [(10,), (3,), (2, 2)])
def test_a_resized_input_runs_in_eager_and_is_counted(shape, backend) -> None:
    """Functional operators don't change a tensor's memory; AOTAutograd fails on the larger size."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.ops.aten.resize_.default(x * 1, shape) if len(shape) > 1 else torch.ops.aten.resize_.default(x, shape)
        )

    compiled = tov.compile(function, backend=backend, options={"min_partition_us": 0})
    x = torch.arange(5.0)
    result, same = compiled(x), min(5, torch.Size(shape).numel())
    assert result.shape == shape and torch.equal(result.flatten()[:same], torch.arange(5.0)[:same])
    assert len(shape) > 1 or x.shape == shape
    assert [fallback.op for fallback in compiled.report.fallbacks] == ["aten.resize_.default", "whole call"]
    assert compiled.report.summary.coverage == 0
