"""Weights that one graph uses both as they are and transposed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchserve_openvino as tov
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.cache.open import CacheSettings

BACKENDS = ("openvino", "openvino_ts", "export")


class Tied(nn.Module):
    """Projects there and back with one weight, as an autoencoder with tied weights does."""

    def __init__(self, back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / 4)
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(functional.linear(x, self.weight).relu(), self.weight)


BACK = {
    "linear of t()": lambda y, w: functional.linear(y, w.t()),
    "matmul": lambda y, w: y @ w,
    "both": lambda y, w: y @ w + functional.linear(y, w),
    "twice": lambda y, w: (y @ w).relu() @ w + y @ w.t(),
    "a view": lambda y, w: y @ w.view(2, 4, 8).flatten(0, 1),
    "contiguous": lambda y, w: functional.linear(y, w.t().contiguous()),
}


def assert_right(model: nn.Module, *inputs: torch.Tensor, backend: str, tolerance: float = 1e-4) -> None:
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    for scale in (1, -2):
        given = [x * scale for x in inputs]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), model(*given), atol=tolerance, rtol=tolerance)
    assert compiled.report.summary.coverage == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("back", BACK)
def test_there_and_back(back: str, backend: str) -> None:
    assert_right(Tied(BACK[back], 8, 8).eval(), torch.randn(2, 5, 8), backend=backend)


def test_batches_of_matrices() -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(torch.bmm(x, self.weight.mT), self.weight)

    assert_right(Batched().eval(), torch.randn(3, 5, 8), backend="openvino")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_narrow_weights(kind: torch.dtype) -> None:
    model = Tied(BACK["matmul"], 8, 8).to(kind).eval()
    assert_right(model, torch.randn(2, 8).to(kind), backend="openvino", tolerance=0.05)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_and_its_transpose(groups: int, kernel: int) -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8 // groups, kernel, kernel) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.conv2d(x, self.weight, padding=kernel // 2, groups=groups).relu()
            return functional.conv_transpose2d(y, self.weight, padding=kernel // 2, groups=groups)

    assert_right(Convolutions().eval(), torch.randn(2, 8, 6, 6), backend="openvino")


class Clones(nn.Module):
    """Two weights of equal content, which a stored model keeps only once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(self.first.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.first) @ self.second


@pytest.mark.parametrize("model", [Tied(BACK["matmul"], 8, 8), Clones()], ids=["one weight", "equal weights"])
def test_models_that_were_stored(model: nn.Module, tmp_path: Path) -> None:
    model, x = model.eval(), torch.randn(2, 8)
    options = {"model_caching": True, "cache_dir": str(tmp_path)}
    with torch.no_grad():
        expected = model(x)
        for warm in (False, True):
            compiled = compile_with(model, CompileSpec(options=options, cache=CacheSettings(for_level=True))).freeze()
            torch.testing.assert_close(compiled(x), expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(compiled(x), expected, atol=1e-4, rtol=1e-4)
            assert bool(compiled.report.cache.hits) is warm
        own = compile_with(model, CompileSpec(own_weights=True)).freeze()
        for _ in range(3):
            torch.testing.assert_close(own(x), expected, atol=1e-4, rtol=1e-4)
