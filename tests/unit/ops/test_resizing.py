"""`interpolate` runs as one operator of OpenVINO's where the sizes say all, and as torch decomposes it elsewhere."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import Resized, assert_same
from torchserve_openvino.ops.opaque_ops import RESIZERS

MODES = {
    "nearest": (1, 2, 3), "nearest-exact": (1, 2, 3),
    "linear": (1,), "bilinear": (2,), "bicubic": (2,), "trilinear": (3,),
}  # fmt: skip
BACKENDS = ("openvino", "openvino_ts", "export")
# OpenVINO's TorchScript frontend takes the first value, not the middle, for a size of 1.
WHOLE = ("openvino", "export")
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def checked(model: nn.Module, x: Tensor, **options: Any) -> tov.CompileReport:
    """Compares with eager twice, and returns the report."""
    torch._dynamo.reset()
    compiled, given = tov.compile(model.eval(), **options), (x, x + 1)
    with torch.inference_mode():
        for value in given:
            assert_same(compiled(value), model(value), strides=False)
    return compiled.report


def counted(report: tov.CompileReport) -> set[str]:
    parts = [part for graph in report.to_dict()["graphs"] for part in graph["partitions"]]
    return {name.split(".")[1] for part in parts for name in part["op_counts"]}


def aligned(mode: str) -> list[dict[str, bool]]:
    return [{}] if "nearest" in mode else [{}, {"align_corners": True}]


@pytest.mark.quick(backend=["openvino"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_sizes_and_whole_factors_stay_one_operator(mode: str, backend: str) -> None:
    for dims in MODES[mode]:
        for how in ({"size": [3, 9, 4][:dims]}, {"size": [1] * dims}, {"scale_factor": 3.0}, {"scale_factor": 1.7}):
            for more in aligned(mode):
                x = torch.randn(2, 3, *[5, 7, 4][:dims])
                report = checked(Resized(mode=mode, **how, **more), x, backend=backend)
                if backend in WHOLE:
                    assert len(counted(report)) == 3 and report.summary.partitions == 1, report.to_text()
                    assert not report.to_dict()["graphs"][0]["decomposed"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_sizes(data: st.DataObject) -> None:
    draw = data.draw
    mode = draw(st.sampled_from(list(MODES)))
    dims = draw(st.sampled_from(MODES[mode]))
    sizes = st.lists(st.integers(1, 40 if dims < 3 else 8), min_size=dims, max_size=dims)
    factors = st.lists(st.sampled_from([0.5, 1.0, 1.7, 2.0, 3.0]), min_size=dims, max_size=dims)
    x = torch.randn(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *draw(sizes))
    new = draw(st.one_of(sizes, factors))
    how = {"size": new} if all(isinstance(each, int) for each in new) else {"scale_factor": new}
    if any(int(size * by) < 1 for size, by in zip(x.shape[2:], how.get("scale_factor", ()), strict=False)):
        return
    if dims == 2:
        x = x.to(memory_format=draw(st.sampled_from(LAYOUTS)))
    checked(Resized(mode=mode, **how, **draw(st.sampled_from(aligned(mode)))), x)


@pytest.mark.parametrize("exact", ["nearest", "nearest-exact"])
def test_nearest_takes_the_value_that_torch_takes(exact: str) -> None:
    # float32 puts some of these between two values: 7 to 3 * 7, 10 to 30, 41 to 287.
    for size, new in ((7, 21), (10, 30), (41, 287), (41, 100), (100, 41), (5, 10), (49, 343)):
        x = torch.arange(size * size, dtype=torch.float32).reshape(1, 1, size, size)
        checked(Resized(size=(new, new), mode=exact), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_openvino_would_round_otherwise_are_decomposed(backend: str) -> None:
    # A product that is whole in float64, and less than that in float32.
    size, factor = next(
        (n, f / 10) for f in range(11, 99) for n in range(2, 60)
        if int(n * (f / 10)) != int(np.float32(n) * np.float32(f / 10) + 1e-6)
    )  # fmt: skip
    report = checked(Resized(mode="bilinear", scale_factor=factor), torch.randn(1, 2, size, size), backend=backend)
    assert "index" in counted(report) and report.summary.coverage == 1


def test_with_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.UpsamplingBilinear2d(scale_factor=2), nn.Upsample(scale_factor=2))
    x = torch.randn(1, 2, 6, 6)
    compiled = tov.compile(model)
    for run in (model, compiled):
        model.zero_grad()
        run(x).square().sum().backward()
        if run is model:
            expected = [each.grad.clone() for each in model.parameters()]
    for each, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(each.grad, grad, rtol=1e-4, atol=1e-4)


def test_without_gradients_of_its_input_it_stays_whole_in_training() -> None:
    model = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 2, 3))
    x = torch.randn(1, 2, 6, 6)
    compiled = tov.compile(model)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert "upsample_bilinear2d" in counted(compiled.report)
    compiled(x).sum().backward()
    assert model[1].weight.grad is not None


def test_a_disabled_one_runs_in_eager_and_is_counted() -> None:
    model = Resized(mode="bilinear", scale_factor=2.0)
    with torch.inference_mode():
        compiled = tov.compile(model, options={"disabled_ops": ["aten.upsample_bilinear2d.vec"]})
        x = torch.randn(1, 2, 5, 7)
        torch.testing.assert_close(compiled(x), model(x))
    found = {(each.kind, each.op) for each in compiled.report.fallbacks}
    assert ("disabled_op", "aten.upsample_bilinear2d.vec") in found


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stand_ins_know_the_layout_of_eager(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(RESIZERS))
    dims = 1 if "1d" in str(op) else 3 if "3d" in str(op) else 2
    shape = data.draw(st.lists(st.integers(1, 3), min_size=dims + 2, max_size=dims + 2))
    order = data.draw(st.permutations(range(dims + 2)))
    x = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(dims + 2)])
    options = [None] if "nearest" in str(op) else [False, None]
    stand_in = getattr(torch.ops.openvino_kept, op._schema.name.split("::")[1]).default
    expected = op(x, [4] * dims, *options)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = stand_in(mode.from_tensor(x), [4] * dims, *options)
    assert found.shape == expected.shape and found.stride() == expected.stride() and found.dtype == expected.dtype


@pytest.mark.quick(mode=["bicubic"], backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "export"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing_runs_on_openvino_where_sizes_are_known(mode: str, backend: str) -> None:
    """As models of pictures fit their embeddings of positions to another size."""
    x = torch.randn(2, 3, 16, 20)
    hows: list[dict[str, Any]] = [
        {"size": (7, 5)}, {"size": (31, 40)}, {"size": (1, 1)}, {"size": (16, 20)}, {"size": (1, 33)},
        {"scale_factor": 0.37}, {"scale_factor": 1.7}, {"scale_factor": (0.5, 2.0)},
        {"size": (5, 9), "align_corners": True}, {"size": (33, 41), "align_corners": True},
    ]  # fmt: skip
    for how in hows:
        report = checked(Resized(mode=mode, antialias=True, **how), x, backend=backend)
        assert report.summary.coverage == 1.0, report.to_text()
    report = checked(Resized(mode=mode, antialias=True, size=(7, 5)), x, backend=backend, dynamic=True)
    assert set(report.fallback_counts()) <= {"conversion_failed", "unsupported_op"}


@pytest.mark.parametrize("how", [
    {"size": (7, 9)}, {"size": (23, 1)}, {"scale_factor": 1.7}, {"size": (20, 30), "align_corners": True},
])  # fmt: skip
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("last", [False, True])
def test_pictures_in_bytes_are_resized_exactly(mode: str, how: dict[str, Any], last: bool) -> None:
    if mode == "nearest" and "align_corners" in how:
        pytest.skip("nearest has no corners")
    x = torch.randint(0, 256, (2, 3, 11, 13), dtype=torch.uint8)
    x = x.to(memory_format=torch.channels_last) if last else x

    def resized(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode=mode, **how)

    assert tov.compile(resized, options={"min_partition_us": 0})(x).equal(resized(x))


@pytest.mark.parametrize("backend", ("openvino", "export"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(
    ("sizes", "factor"),
    [((4,), 2.2), ((32,), 2.004), ((7, 7), 1.1), ((3, 100), 2.004), ((2, 2), 2.3), ((4, 4, 4), 1.2)],
)
def test_factors_on_which_torch_s_kernels_disagree(
    sizes: tuple[int, ...], factor: float, dtype: torch.dtype, backend: str
) -> None:
    x = torch.arange(3 * int(np.prod(sizes))).reshape(1, 3, *sizes).to(dtype)
    for layout in (torch.contiguous_format, *([torch.channels_last] if len(sizes) == 2 else [])):
        checked(Nearest(factor), x.contiguous(memory_format=layout), backend=backend)


@pytest.mark.parametrize("factor", [1.25, 1.5, 2.25, 3.0])
def test_factors_on_which_torch_s_kernels_disagree_at_sizes_of_any_call(factor: float) -> None:
    model = Nearest(factor)
    compiled = tov.compile(model, dynamic=True)
    for size in (2, 4, 7, 16, 3):
        x = torch.randn(2, 3, size, size + 1)
        assert_same(compiled(x), model(x), strides=False)


class Nearest(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x * 2, scale_factor=self.factor, mode="nearest") * 1
