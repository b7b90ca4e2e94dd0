"""Results, and the caller's inputs, stay resizable: a call leaves no mark on their memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov

BACKENDS = ("openvino", "openvino_ts", "export")


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 1) + 1


def breaks(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return torch.zeros(4, 5, out=y)


def writes_to_what_it_made(x: Tensor) -> Tensor:
    return torch.zeros([2, 3], out=torch.tensor(1)) + x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_inputs_can_be_resized(backend: str, dtype: torch.dtype, dynamic: bool) -> None:
    model = Net().eval()
    compiled = tov.compile(model, backend=backend, dynamic=dynamic, options={"min_partition_us": 0})
    # A million elements: their memory goes back to the system, and whoever reads it afterwards crashes.
    for width in (3, 500_000, 5):
        x = torch.randn(2, width).to(dtype)
        with torch.no_grad():
            result, expected = compiled(x), model(x)
            torch.testing.assert_close(result, expected)
            assert torch.zeros(4, 5, dtype=dtype, out=compiled(x)).shape == (4, 5)
        assert result.resize_(2 * width + 7).shape == (2 * width + 7,)
        assert x.resize_(4 * width, 3).shape == (4 * width, 3)
    assert compiled.report.summary.ops_on_openvino
    assert compiled.report.fallback_counts() == {}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("function", [breaks, writes_to_what_it_made])
def test_the_models_own_code_can_resize_a_result(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2, 3)[:, :1]
    with torch.no_grad():
        torch.testing.assert_close(tov.compile(function, options={"min_partition_us": 0})(x), function(x))


def test_a_frozen_model_leaves_them_resizable() -> None:
    compiled, x = tov.compile(Net().eval(), options={"min_partition_us": 0}).freeze(), torch.randn(2, 3)
    with torch.no_grad():
        results = [compiled(x) for _ in range(4)]
    assert compiled.frozen == 1
    assert {tuple(result.resize_(4, 5).shape) for result in (*results, x)} == {(4, 5)}


def test_a_buffer_that_only_the_cache_reads_stays_resizable(tmp_path) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("unused", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, 1) + 1

    model = Kept().eval()
    compiled = tov.compile(model, options={"cache_dir": str(tmp_path), "model_caching": True}).freeze()
    with torch.no_grad():
        compiled(torch.randn(2, 3))
    assert compiled.report.summary.ops_on_openvino
    assert model.unused.resize_(100).shape == (100,)
