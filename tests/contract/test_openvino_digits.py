"""Faults of OpenVINO's CPU plugin in sums, pools and zeros. A failure means that upstream fixed one."""

from collections.abc import Callable

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from torchserve_openvino.backend.upstream._openvino_private import keep_in_f32

LONG = np.random.default_rng(0).standard_normal(4_000_000, dtype=np.float32) + np.float32(50)


def run(build: Callable[..., ov.Node], x: np.ndarray, *, open_sizes: bool = False, threads: int = 1) -> np.ndarray:
    parameter = ops.parameter([-1] * x.ndim if open_sizes else list(x.shape), ov.Type.f32)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    model = ov.Core().compile_model(ov.Model([build(parameter)], [parameter]), "CPU", properties)
    return model(x)[0]


def mean(*axes: int, keep: bool = False) -> Callable[..., ov.Node]:
    return lambda x: ops.reduce_mean(x, ops.constant(np.array(axes)), keep)


def error(mean: np.ndarray) -> float:
    return float(np.abs(mean - LONG.mean(dtype=np.float64)).max() / 50)


def test_sums_lose_digits_in_one_dimension_and_along_other_axes_than_the_last() -> None:
    """`passes.ov.long_reductions` avoids these."""
    assert error(run(mean(0), LONG)) > 1e-3
    columns = LONG.reshape(-1, 1).repeat(2, 1)
    assert error(run(mean(0), columns)) > 1e-3
    running = run(lambda x: ops.cum_sum(x, ops.constant(np.int64(0))), LONG)
    assert abs(running[-1] / LONG.sum(dtype=np.float64) - 1) > 1e-5


@pytest.mark.parametrize("open_sizes", [False, True])
def test_sums_along_the_last_axis_of_a_matrix_keep_their_digits(open_sizes: bool) -> None:
    assert error(run(mean(0, 1), LONG[None], open_sizes=open_sizes)) < 1e-5
    assert error(run(mean(1), LONG[None], open_sizes=open_sizes)) < 1e-5


def test_reductions_of_which_one_keeps_its_axes_are_not_joined() -> None:
    columns = LONG.reshape(2000, 2000, 1).repeat(2, 2)
    assert error(run(lambda x: mean(0, 1)(mean(1, keep=True)(x)), columns)) < 1e-5
    assert error(run(lambda x: mean(0)(mean(1)(x)), columns)) > 1e-3


def test_the_largest_of_minus_infinity_is_finite_and_nan_is_lost() -> None:
    """`passes.fx.max_pools` restores them."""
    x = np.array([[[-np.inf, -np.inf, np.nan, 1]]], np.float32)
    pooled = run(lambda x: ops.max_pool(x, [2], [1], [0], [0], [2]).output(0), x)
    assert np.array_equal(pooled.ravel(), [np.finfo(np.float32).min, 1])


def test_a_product_with_a_known_number_loses_the_sign_of_zero_where_sizes_are_open() -> None:
    """`passes.ov.zero_signs` hides the number."""
    zero = np.zeros(4, np.float32)
    for build in (ops.negative, lambda x: ops.multiply(x, ops.constant(np.float32(-2)))):
        assert np.signbit(run(build, zero)).all() and not np.signbit(run(build, zero, open_sizes=True)).any()


def test_a_running_sum_in_bfloat16_is_rounded_after_each_value() -> None:
    """`ops.rules.precision.narrow_floats` computes it in float32, like the norm below."""

    def summed(x: ov.Node) -> ov.Node:
        return ops.convert(ops.cum_sum(ops.convert(x, ov.Type.bf16), ops.constant(np.int64(0))), ov.Type.f32)

    assert run(summed, np.ones(1000, np.float32))[-1] == 256


@pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="this CPU computes no bfloat16"
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_marked_node_is_computed_in_float32(marked: bool) -> None:
    """The attribute ``precise`` of an IR; unmarked, the plugin adds up in bfloat16, and stops at 256."""
    x, weights = ops.parameter([1, 600, 16], ov.Type.f32), ops.constant(np.full((16, 16), 1 / 16, np.float32))
    running = ops.cum_sum(ops.matmul(x, weights, False, False), ops.constant(np.int64(1)))
    if marked:
        keep_in_f32(running)
    model = ov.Model([ops.matmul(running, weights, False, False)], [x])
    compiled = ov.Core().compile_model(model.clone(), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    last = float(compiled(np.ones((1, 600, 16), np.float32))[0][0, -1, 0])
    assert last == pytest.approx(600 if marked else 256, rel=0.01)


def test_group_normalization_has_no_kernel_for_bfloat16() -> None:
    def normalized(x: ov.Node) -> ov.Node:
        ones = ops.constant(np.ones(4, np.float32))
        values = (ops.convert(value, ov.Type.bf16) for value in (x, ones, ones))
        return ops.convert(ops.group_normalization(*values, 2, 1e-5), ov.Type.f32)

    with pytest.raises(RuntimeError, match="GroupNormalization"):
        run(normalized, np.ones((1, 4, 8), np.float32))
