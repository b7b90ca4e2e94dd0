"""`interpolate` with sizes that are known only at each call: one operator, as with static sizes, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchserve_openvino as tov
from helpers import Resized, assert_same

PLAIN = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}
HOW: dict[str, dict[str, Any]] = {
    "size": {"size": [40, 31, 12]},
    "twice": {"scale_factor": 2.0},
    "half": {"scale_factor": 0.5},
    "computed": {"scale_factor": 1.5, "recompute_scale_factor": True},
    "corners": {"scale_factor": 2.0, "align_corners": True},
}
SHAPES = ([17, 23, 5], [9, 46, 8])


class AsLargeAs(nn.Module):
    """Resizes as feature pyramids and segmentation heads do."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return F.interpolate(x, size=other.shape[2:], mode=self.mode) + other


def _same(model: nn.Module, *calls: tuple[Tensor, ...], **options: Any) -> tov.CompileReport:
    torch._dynamo.reset()
    compiled = tov.compile(model.eval(), dynamic=True, options={"min_partition_us": 0}, **options)
    with torch.inference_mode():
        for call in calls:
            assert_same(compiled(*call), model(*call), strides=False)
    return compiled.report


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("mode", PLAIN)
def test_open_sizes_stay_one_operator(mode: str, name: str) -> None:
    if name == "corners" and "nearest" in mode:
        pytest.skip("has no corners to align")
    for dims in PLAIN[mode]:
        how = {key: value[:dims] if key == "size" else value for key, value in HOW[name].items()}
        report = _same(Resized(mode=mode, **how), *((torch.randn(2, 3, *shape[:dims]),) for shape in SHAPES))
        summary = report.summary
        assert (summary.coverage, summary.graphs, summary.partitions, summary.ops_total) == (1.0, 1, 1, 3), (
            report.to_text()
        )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_the_size_of_another_tensor(mode: str) -> None:
    pairs = [((2, 3, 16, 23), (2, 3, 31, 46)), ((2, 3, 33, 18), (2, 3, 66, 36)), ((2, 3, 64, 64), (2, 3, 20, 51))]
    report = _same(AsLargeAs(mode), *((torch.randn(a), torch.randn(b)) for a, b in pairs))
    assert report.summary.coverage == 1.0 and report.summary.partitions == 1, report.to_text()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_takes_the_value_that_torch_takes_at_open_sizes(mode: str) -> None:
    # float32 puts some of these between two values, as in test_resizing.py.
    pairs = [(7, 21), (10, 30), (41, 287), (41, 100), (100, 41), (5, 10), (49, 343), (5, 25), (6, 37)]
    calls = [
        (torch.arange(size * size, dtype=torch.float32).reshape(1, 1, size, size), torch.zeros(1, 1, new, new))
        for size, new in pairs
    ]
    _same(AsLargeAs(mode), *calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_positions_are_exact_in_every_type(mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 301, 257).to(dtype)
    _same(Resized(mode=mode, size=(413, 207)), (x,))


def test_channels_last() -> None:
    for mode in ("nearest", "bilinear"):
        model = Resized(mode=mode, scale_factor=2.0).eval()
        compiled = tov.compile(model, dynamic=True)
        for shape in ((2, 3, 16, 23), (1, 3, 33, 18)):
            x = torch.randn(shape).to(memory_format=torch.channels_last)
            with torch.no_grad():
                assert_same(compiled(x), model(x))


def test_a_factor_that_float32_rounds_is_decomposed() -> None:
    report = _same(Resized(mode="bilinear", scale_factor=1.7), *((torch.randn(2, 3, *shape[:2]),) for shape in SHAPES))
    assert report.summary.ops_total > 30


def test_antialiasing_is_refused() -> None:
    report = _same(Resized(mode="bilinear", size=(9, 11), antialias=True), (torch.randn(2, 3, 16, 23),))
    assert {each.op for each in report.fallbacks} == {"aten._upsample_bilinear2d_aa.default"}


def test_a_number_computed_from_sizes_leaves_only_its_operator_out() -> None:
    """The conversion of the partition that takes it failed as one."""
    report = _same(_by_length(), (torch.randn(2, 3, 16),), (torch.randn(2, 3, 33),))
    assert {each.kind for each in report.fallbacks} == {"unsupported_op"}, report.to_text()
    assert report.summary.coverage > 0


def _by_length() -> nn.Module:
    class ByLength(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ x.transpose(1, 2)) * (x.shape[2] ** -0.5)

    return ByLength()
