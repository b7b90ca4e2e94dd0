"""NaN in an input: eager's answer, counted, unless the model replaces it itself."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same

OPTIONS = {"min_partition_us": 0}
NAN = math.nan
WHOLE = torch.tensor([[1.0, 0.5, -2.0, 3.0], [4.0, -1.0, 0.25, 2.0]])
BROKEN = torch.tensor([[1.0, NAN, -2.0, 3.0], [4.0, -1.0, 0.25, 2.0]])
# What OpenVINO's CPU plugin makes a number of, or spoils otherwise.
LOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "hardsigmoid": F.hardsigmoid,
    "exp": torch.exp,
    "celu": F.celu,
    "sign": torch.sign,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "normalize": F.normalize,
    "max pooling": lambda x: F.max_pool1d(x[None], 2),
    "adaptive max pooling": lambda x: F.adaptive_max_pool1d(x[None], 2),
}
REPLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_to_num": lambda x: torch.nan_to_num(x).relu(),
    "where isnan": lambda x: torch.where(x.isnan(), 0.0, x).relu(),
    "compared with itself": lambda x: torch.where(torch.ne(x, x), torch.zeros_like(x), x).relu(),
    "of a view": lambda x: torch.nan_to_num(x.t()[1:], 0.5).relu(),
}


@pytest.mark.parametrize("name", LOSES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.many(2)
def test_a_call_with_nan_runs_in_eager(name: str, dynamic: bool) -> None:
    model = LOSES[name]
    compiled = tov.compile(lambda x: model(x) * 2, options=OPTIONS, dynamic=dynamic)
    for x in (WHOLE, BROKEN, WHOLE + 1):
        assert_same(compiled(x), model(x) * 2)
    assert compiled.report.summary.coverage == 1.0
    (fallback,) = compiled.report.fallbacks
    assert (fallback.kind, fallback.count) == ("runtime_failed", 1)
    assert "float input 0 holds NaN" in fallback.reason


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("name", REPLACES)
def test_a_model_that_replaces_nan_runs_on_openvino(name: str, backend: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return REPLACES[name](x)

    compiled = tov.compile(Model().eval(), options=OPTIONS, backend=backend)
    with torch.no_grad():
        for x in (BROKEN, WHOLE):
            assert_same(compiled(x), REPLACES[name](x))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_infinities_and_sums_that_overflow_are_no_nan(kind: torch.dtype) -> None:
    mask = torch.tensor([[0.0, -math.inf, 0.0, 0.0], [-math.inf] * 3 + [0.0]]).to(kind)
    large = torch.full((2, 4), torch.finfo(kind).max / 2, dtype=kind)
    compiled = tov.compile(lambda m, x: (x.clamp(-1, 1) + m).softmax(-1), options=OPTIONS)
    compiled(mask, large)
    both = torch.stack([large, -large]).amax(0)
    assert_same(compiled(mask, both), (both.clamp(-1, 1) + mask).softmax(-1))
    assert not compiled.report.fallbacks


def test_frozen_and_from_the_cache(tmp_path) -> None:
    options = OPTIONS | {"model_caching": True, "cache_dir": str(tmp_path)}
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    for status in ("miss", "hit"):
        torch._dynamo.reset()
        compiled = tov.compile(model, options=options).freeze()
        with torch.no_grad():
            for x in (WHOLE, WHOLE + 1, BROKEN, WHOLE):
                assert_same(compiled(x), model(x))
        assert compiled.frozen and compiled.report.fallback_counts() == {"runtime_failed": 1}
        assert compiled.report.to_dict()["cache"]["status"] == status


def test_each_input_is_looked_at() -> None:
    compiled = tov.compile(lambda x, y: torch.nan_to_num(x).relu() + y.relu(), options=OPTIONS)
    assert_same(compiled(BROKEN, WHOLE), torch.nan_to_num(BROKEN).relu() + WHOLE.relu())
    assert not compiled.report.fallbacks
    assert_same(compiled(WHOLE, BROKEN), WHOLE.relu() + BROKEN.relu())
    assert compiled.report.fallback_counts() == {"runtime_failed": 1}
