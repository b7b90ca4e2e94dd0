"""The backend openvino_ts, which converts through TorchScript."""

from pathlib import Path

import pytest
import torch
from backend_models import MODELS, Counting, inputs, mlp
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.cache.open import CacheSettings


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_eagers_for_every_batch(name: str, dynamic: bool) -> None:
    model = MODELS[name]()
    compiled = tov.compile(model, backend="openvino_ts", dynamic=dynamic, options={"min_partition_us": 0})
    for count, batch in enumerate((2, 3, 7), 1):
        left = {"unsupported_op": 1 if dynamic else count} if name == "odd" else None
        check(model, compiled=compiled, coverage=None, fallbacks=left, **inputs(model, batch))
    assert compiled.report.to_dict()["config"]["backend"] == "openvino_ts"
    if name != "odd":
        assert compiled.report.summary.coverage == 1.0
    assert compiled.report.summary.graphs == (1 if dynamic else 3)
    assert "backend openvino_ts" in compiled.report.summary_line()


def test_a_size_that_the_tracer_can_not_follow_leaves_its_operator_out() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(x.shape[0]).float().reshape(-1, 1) + x.relu()

    model = Sized()
    compiled = tov.compile(model, backend="openvino_ts", dynamic=True)
    with torch.inference_mode():
        for batch in (2, 5):
            x = torch.randn(batch, 4)
            assert_same(compiled(x), model(x))
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "conversion_failed" and "arange" in fallback.op and "takes a size" in fallback.reason


def test_an_operator_that_this_frontend_lacks_runs_in_eager() -> None:
    class Scatter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.select_scatter(x.relu(), x[:, 0], 1, 2) * 2

    compiled = tov.compile(Scatter(), backend="openvino_ts", options={"min_partition_us": 0})
    x = torch.randn(3, 4)
    with torch.inference_mode():
        assert_same(compiled(x), Scatter()(x), strides=False)
    (fallback,) = compiled.report.fallbacks
    assert (fallback.kind, fallback.op) == ("conversion_failed", "aten.select_scatter.default")
    assert "No conversion rule" in fallback.reason


def test_a_disabled_operator_stays_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    compiled = tov.compile(model, backend="openvino_ts", options={"disabled_ops": ["aten.relu"]})
    check(model, torch.randn(2, 4), compiled=compiled, coverage=None, fallbacks={"disabled_op": 1})


def test_changed_weights_are_seen() -> None:
    model = mlp()
    compiled = tov.compile(model, backend="openvino_ts")
    x = torch.randn(2, 6)
    for change in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model[0].weight.mul_(change)  # type: ignore[operator, union-attr]
            assert_same(compiled(x), model(x))


def test_a_buffer_that_the_model_writes_to() -> None:
    model, other = Counting().eval(), Counting().eval()
    compiled = tov.compile(model, backend="openvino_ts")
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(x), other(x))
    assert model.seen.item() == 3


def test_a_cache_does_not_mix_the_converters_up(tmp_path: Path) -> None:
    model = mlp()
    x = torch.randn(2, 6)
    options = {"model_caching": True, "cache_dir": str(tmp_path / "c")}
    seen = []
    for backend in ("openvino", "openvino_ts", "openvino_ts", "export", "export"):
        torch.compiler.reset()
        compiled = compile_with(model, CompileSpec(backend=backend, options=options, cache=CacheSettings())).freeze()
        with torch.inference_mode():
            assert_same(compiled(x), model(x))
        seen.append((compiled.report.cache.call_hits, compiled.report.cache.traces))
    assert seen == [(0, 1), (0, 1), (1, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("dim", [None, -1])
def test_a_sum_is_cast_before_it_is_summed(dim: int | None, dtype: torch.dtype) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 3).sum(dtype=dtype) if dim is None else (x * 3).sum(dim, dtype=dtype)

    model = Sum().eval()
    compiled = tov.compile(model, backend="openvino_ts", options={"min_partition_us": 0})
    # Summed in bfloat16 and cast afterwards, a float32 sum loses digits, and an int64 sum is another integer.
    for values in (torch.linspace(0.3, 1.9, 33).view(3, 11), torch.tensor([[1.1797, 0.8789, 0.6445]])):
        x = values.to(torch.bfloat16)
        with torch.no_grad():
            assert_same(compiled(x), model(x))
