"""Every kind of input and output that the backend supports, compared with eager."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_types(dtype: torch.dtype) -> None:
    check(net(dtype), torch.randn(3, 8, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_integer_inputs_to_an_embedding(dtype: torch.dtype) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids.to(torch.int64)).sum(1)

    check(Embed(), torch.randint(0, 20, (2, 5)).to(dtype))


def test_padding_from_the_other_side() -> None:
    """The frontend merges the two slices that are written to into one operation."""
    check(nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular").eval(), torch.randn(2, 3, 8, 8))
    check(nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular").eval(), torch.randn(2, 3, 8))


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)])
def test_a_norm_that_is_still_in_training(layer: nn.Module) -> None:
    other, x = copy.deepcopy(layer), torch.randn(2, 3, 8, 8)
    compiled = tov.compile(layer.train(), options={"min_partition_us": 0})
    with torch.no_grad():
        for scale in (1.0, 3.0):
            assert_same(compiled(x * scale), other(x * scale))
            assert_same(layer.running_var, other.running_var)
    assert compiled.report.summary.coverage == 1.0


def test_bool_input_and_output() -> None:
    check(lambda x, m: (x * m, x > 0, ~m), torch.randn(4, 4), torch.rand(4, 4) > 0.5)


def test_float64_stays_in_eager_and_is_counted() -> None:
    compiled = check(
        lambda x: torch.sin(x) * 2,
        torch.randn(5, dtype=torch.float64),
        coverage=0.0,
        fallbacks={"unsupported_op": 2},
    )
    assert "float64" in compiled.report.fallbacks[0].reason


def test_int64_beyond_32_bits_is_right() -> None:
    x = torch.tensor([2**40, -(2**35), 5, 2**31])
    compiled = check(lambda x: x + x, x, fallbacks={"runtime_failed": 2})
    assert "outside -8388608 to 8388608" in compiled.report.fallbacks[0].reason
    small = torch.tensor([3, -4, 5, 6])
    check(lambda x: x + x, small, compiled=compiled, fallbacks={"runtime_failed": 2})


def test_int64_product_beyond_32_bits_is_right() -> None:
    model = lambda x: (x * x).sum()
    compiled = tov.compile(model)
    for values in ([2**20, 3, -(2**25)], [200, 3, -7]):
        x = torch.tensor(values)
        assert_same(compiled(x), model(x))
    assert compiled.report.fallback_counts() == {"runtime_failed": 1}


def test_position_ids_from_a_mask_run_on_openvino() -> None:
    check(lambda mask: torch.cumsum(mask, 1) * mask - 1, torch.ones(2, 9, dtype=torch.int64))


def test_uint8_arithmetic_wraps_as_in_torch() -> None:
    x = torch.tensor([200, 100, 255], dtype=torch.uint8)
    check(lambda x: x + x, x)


def test_several_and_nested_outputs_with_none_and_constants() -> None:
    def model(x: torch.Tensor) -> dict[str, object]:
        return {"a": [x + 1, (x * 2, None)], "b": {"c": x.sum(), "d": 3, "e": x}, "f": torch.ones(2)}

    check(model, torch.randn(2, 3))


def test_keyword_inputs_and_defaults() -> None:
    def model(x: torch.Tensor, *, scale: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * scale if mask is None else x * scale + mask

    compiled = check(model, torch.randn(3))
    check(model, torch.randn(3), scale=3.0, mask=torch.ones(3), compiled=compiled)


def test_non_contiguous_inputs() -> None:
    model = net()
    base = torch.randn(8, 6)
    check(model, base.t())
    check(model, torch.randn(6, 16)[:, ::2])
    check(lambda x: x * 2 + 1, torch.randn(3, 1).expand(3, 4), strides=False)


def test_channels_last_keeps_strides() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1).eval().to(memory_format=torch.channels_last)
    check(conv, torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last))


def test_views_returned() -> None:
    x = torch.randn(4, 6)
    compiled = tov.compile(lambda x: (x.t(), x[1:], x.view(6, 4), (x + 1).transpose(0, 1)))
    a, b, c, d = compiled(x)
    assert_same([a, b, c, d], [x.t(), x[1:], x.view(6, 4), (x + 1).transpose(0, 1)])
    # Eager returns views of the input: a write through one is seen in the other.
    a.zero_()
    assert x.abs().sum() == 0


def test_scalar_output() -> None:
    check(lambda x: x.mean(), torch.randn(3, 3))
    check(lambda x: x.argmax(), torch.randn(9))


@pytest.mark.parametrize("dims", [0, -1, (0,)])
def test_a_scalar_is_squeezed(dims: int | tuple[int, ...]) -> None:
    check(lambda x: torch.squeeze(x.sum() * 2, dims) * 3, torch.randn(4))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_zero_size_batches(shape: tuple[int, ...]) -> None:
    model = net()
    compiled = tov.compile(model)
    with torch.no_grad():
        assert_same(compiled(torch.zeros(shape)), model(torch.zeros(shape)))
        assert_same(compiled(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_zero_size_after_dynamic() -> None:
    model = net()
    compiled = tov.compile(model, dynamic=True)
    with torch.no_grad():
        for batch in (3, 5, 0, 1, 4):
            x = torch.randn(batch, 8)
            assert_same(compiled(x), model(x))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_transformer_fast_path(norm_first: bool, masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]]) if masked else None
    check(model, torch.randn(2, 3, 8), src_key_padding_mask=mask)


def test_multi_head_attention_fast_path() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    check(model, x, x, x)
    check(model, x, x, x, need_weights=False)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.integers(1, 6), length=st.integers(1, 9))
def test_dynamic_shapes_run_on_openvino(batch: int, length: int) -> None:
    x = torch.randn(batch, length, 8)
    with torch.no_grad():
        assert_same(DYNAMIC(x), DYNAMIC.eager(x))
    assert DYNAMIC.report.summary.coverage == 1.0, DYNAMIC.report.to_text()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).reshape(x.shape[0] * x.shape[1], -1)
        return torch.cat([y, y[:1] * x.shape[1]], 0)


DYNAMIC = tov.compile(_Attention().eval(), dynamic=True)


def test_dynamic_graph_is_one_graph() -> None:
    model = net()
    compiled = tov.compile(model, dynamic=True)
    for batch in (2, 5, 9, 17):
        x = torch.randn(batch, 8)
        with torch.no_grad():
            assert_same(compiled(x), model(x))
    summary = compiled.report.summary
    assert (summary.graphs, summary.coverage, summary.fallbacks) == (1, 1.0, 0), compiled.report.to_text()
    assert compiled.report.to_dict()["graphs"][0]["dynamic"]


def test_static_shapes_recompile_with_dynamos_reason() -> None:
    model = net()
    compiled = tov.compile(model, dynamic=False)
    for batch in (2, 3, 4):
        check(model, torch.randn(batch, 8), compiled=compiled)
    report = compiled.report.to_dict()
    assert report["summary"]["recompiles"] == 2
    assert all("size mismatch" in entry["reason"] for entry in report["recompiles"])


def test_more_shapes_than_dynamos_default_limit() -> None:
    model = net()
    compiled = tov.compile(model, dynamic=False)
    for batch in range(2, 14):
        check(model, torch.randn(batch, 8), compiled=compiled)


def test_integer_argument_that_changes() -> None:
    model = lambda x, n: x * n + n
    compiled = tov.compile(model, dynamic=None)
    for n in (2, 3, 7):
        x = torch.randn(3)
        assert_same(compiled(x, n), model(x, n))


_SQUEEZES = {
    "last": lambda x: x.squeeze(-1),
    "all": lambda x: x.squeeze(),
    "two": lambda x: x.squeeze((0, -1)),
    "some go": lambda x: x[:, None].squeeze((1, 2)),
}


@pytest.mark.parametrize("squeeze", _SQUEEZES.values(), ids=_SQUEEZES)
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_symbolic_dimension_that_a_squeeze_names_stays(squeeze, dynamic) -> None:
    """OpenVINO assumes that it is removed; later operators would then write along the wrong dimension."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = torch.select_scatter(squeeze(x), squeeze(x)[0] * 2, 0, 1)
        return written.reshape(written.shape[0], -1).amax(-1), written.sum(0)

    compiled = tov.compile(model, dynamic=dynamic)
    for shape in ((3, 5, 2), (3, 6, 3), (4, 1, 2), (3, 5, 1)):
        check(model, torch.randn(shape), compiled=compiled)


@pytest.mark.parametrize("divide", [lambda x: x % x.numel(), lambda x: x // x.shape[0], lambda x: x % (x.shape[1] - 6)])
def test_integers_divided_by_a_symbolic_size(divide) -> None:
    compiled = tov.compile(divide, dynamic=True)
    for shape in ((4, 9), (5, 8)):
        check(divide, torch.randint(-50, 50, shape), compiled=compiled)


def test_integers_divided_by_a_symbolic_size_that_is_0() -> None:
    compiled = tov.compile(lambda x: x % (x.shape[1] - 6), dynamic=True)
    compiled(torch.ones(4, 9, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(torch.ones(4, 6, dtype=torch.int64))
