"""Models that would crash OpenVINO's CPU plugin while it fuses operators; an undetected one kills the process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openvino as ov
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.passes.ov.fused_chains import crashes_plugin

Tensor = torch.Tensor
# Operators after a chain: `a` is its end, `v` does not depend on it.
TAILS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate": lambda a, v: v.sigmoid() * a - a,
    "residual": lambda a, v: torch.tanh(a) + v.exp(),
    "highway": lambda a, v: v.sigmoid() * a + (1 - v.sigmoid()) * v,
    "where": lambda a, v: torch.where(v > 0, a, 0.0),
    "compare": lambda a, v: (a > v.exp()).float(),
    "twice": lambda a, v: (a - v) * a.exp(),
    "plus": lambda a, v: a + v,
    "minus": lambda a, v: a - v,
    "over": lambda a, v: torch.tanh(a / v),
    "centered": lambda a, v: a - a.mean(-1, keepdim=True),
    "beside a distribution": lambda a, v: a + v.log_softmax(-1),
    "beside a unit": lambda a, v: torch.tanh(a * F.normalize(v, dim=-1)),
    "beside softsign": lambda a, v: a + F.softsign(v),
    "many": lambda a, v: a + v.exp() + v.tanh() + v.abs() + v.sin() + v.cos() + v.sigmoid() + torch.erf(v),
    "loss": lambda a, v: F.binary_cross_entropy_with_logits(a, v.sigmoid()),
}


class Layers(nn.Module):
    def __init__(self, tail: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        self.tail = TAILS[tail]

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return self.tail(self.layers(x), v)


class Attention(nn.Module):
    """Heads in the third dimension, as projections lay them out."""

    def __init__(self, tail: str) -> None:
        super().__init__()
        self.tail = TAILS[tail]

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        heads = x.transpose(1, 2)
        return self.tail(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2), v)


# Operators after attention: `a` is its end, `v` does not depend on it; broadcasting may enlarge the result.
LARGER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "over": lambda a, v: F.logsigmoid(a / v),
    "plus": lambda a, v: torch.tanh(a + v) * (a + v),
    "where": lambda a, v: F.logsigmoid(torch.where(v > 1, a, 0.5)),
    "compare": lambda a, v: (a > v).float().sin(),
    "centered": lambda a, v: F.layer_norm(a * v, (4,)),
}
CASES = [(kind, tail) for kind in (Layers, Attention) for tail in TAILS]


class PlainAttention(nn.Module):
    """Attention written as matmul, softmax, matmul."""

    def __init__(self, tail: str) -> None:
        super().__init__()
        self.tail = LARGER[tail]

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return self.tail(torch.softmax(x @ x.transpose(-1, -2), -1) @ x, v.exp())


class Residual(nn.Module):
    """Residual blocks, as in networks for tabular data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _inputs(kind: type, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, 16), (8, 10)] if kind is Layers else [(2, 16, 4, 32)] * 2
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.quick(dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("kind", "tail"), CASES)
def test_a_chain_and_what_follows(kind: type, tail: str, dynamic: bool) -> None:
    model = kind(tail).eval()
    compiled = tov.compile(model, dynamic=dynamic, options={"config": {"INFERENCE_PRECISION_HINT": "f32"}})
    with torch.no_grad():
        for seed in (0, 1):
            inputs = _inputs(kind, seed)
            assert_same(compiled(*inputs), model(*inputs))
    assert compiled.report.summary.fallbacks == 0


@pytest.mark.parametrize("shapes", [((2, 5, 4), (2, 5, 4)), ((2, 1, 4), (3, 1)), ((2, 5, 4), (3, 1, 1, 1))])
@pytest.mark.parametrize("tail", LARGER)
def test_attention_that_becomes_larger(tail: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    model = PlainAttention(tail).eval()
    compiled = tov.compile(model, options={"min_partition_us": 0, "config": {"INFERENCE_PRECISION_HINT": "f32"}})
    with torch.no_grad():
        for _ in range(2):
            inputs = [torch.randn(shape) for shape in shapes]
            assert_same(compiled(*inputs), model(*inputs))
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [Layers, Attention])
def test_a_residual_of_an_input_that_is_converted(kind: type, dtype: torch.dtype) -> None:
    model = kind("plus").eval().to(dtype)
    compiled = tov.compile(model, options={"min_partition_us": 0, "config": {"INFERENCE_PRECISION_HINT": "f32"}})
    with torch.no_grad():
        for seed in (0, 1):
            inputs = [each.to(dtype) for each in _inputs(kind, seed)]
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0.02, atol=0.02)
    assert compiled.report.summary.coverage == 1.0
    assert compiled.report.summary.fallbacks == 0


def test_beside_a_batch_norm() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: Tensor, v: Tensor) -> Tensor:
            heads = x.transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2) + self.norm(v)

    model = Normed().eval()
    compiled = tov.compile(model, options={"config": {"INFERENCE_PRECISION_HINT": "f32"}})
    with torch.no_grad():
        inputs = _inputs(Attention, 0)
        assert_same(compiled(*inputs), model(*inputs))
    assert compiled.report.summary.fallbacks == 0


@pytest.fixture
def fused_again() -> Iterator[None]:
    """For other devices than CPU, fusion is disabled in the whole process."""
    yield
    core().set_property("CPU", {"SNIPPETS_MODE": "ENABLE"})


@pytest.mark.usefixtures("fused_again")
@pytest.mark.parametrize("device", ["CPU", "AUTO"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_residual_blocks(backend: str, device: str) -> None:
    model, x = Residual().eval(), torch.randn(8, 64)
    options = {"device": device, "config": {"INFERENCE_PRECISION_HINT": "f32"}}
    compiled = tov.compile(model, backend=backend, options=options)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    assert any("would crash" in note for note in compiled.report.to_dict()["notes"])


@pytest.mark.parametrize("for_level", [False, True])
def test_from_the_cache(tmp_path: Path, for_level: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(8, 64)
    options = {"model_caching": True, "cache_dir": str(tmp_path), "config": {"INFERENCE_PRECISION_HINT": "f32"}}
    for warm in (False, True):
        compiled = compile_with(model, CompileSpec(options=options, cache=CacheSettings(for_level=for_level)))
        with torch.no_grad():
            assert_same(compiled(x), model(x))
        assert bool(compiled.report.cache.hits) is warm


def _model_of(compiled_module: nn.Module, *inputs: Tensor) -> ov.Model:
    return ov.convert_model(torch.export.export(compiled_module, inputs))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)[:, 0]))


@pytest.mark.slow
def test_everyday_models_are_fused() -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    assert crashes_plugin(_model_of(layers, torch.randn(8, 16))) == ""
    assert crashes_plugin(_model_of(Encoder().eval(), torch.randn(2, 7, 32))) == ""
    assert crashes_plugin(_model_of(Residual().eval(), torch.randn(8, 64))) != ""


def test_attention_with_a_mask_is_fused() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.randn(2, 4, 16, 32), torch.ones(2, 1, 16, 16, dtype=torch.bool)
    compiled = tov.compile(Masked())
    with torch.no_grad():
        assert_same(compiled(x, mask), Masked()(x, mask))
    assert not any("would crash" in note for note in compiled.report.to_dict()["notes"])
