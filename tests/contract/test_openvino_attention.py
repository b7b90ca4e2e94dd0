"""Pins what OpenVINO's CPU plugin does wrong in kernels of attention and of gated products; the cures are right."""

import signal
import subprocess
import sys

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from torchserve_openvino.config.openvino.precisions import no_bf16x3
from torchserve_openvino.passes.ov.attention_operands import repeat_attention_operands
from torchserve_openvino.passes.ov.narrow_masks import keep_masks_finite, round_masks
from torchserve_openvino.passes.pass_context import PassContext

CORE = ov.Core()
HAS_BF16 = "BF16" in CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
HAS_AMX = no_bf16x3("CPU") is None
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this CPU computes no bfloat16")


def attention(operand, join, rows: int, columns: int, precision: str, repeats: list[int] | None = None):
    """Returns the largest difference between attention on OpenVINO and in NumPy, relative to the largest value.

    Args:
        operand: What is joined: with the scores if it is a row, with the result if it is a column.
        join: Called with a value and the operand, for OpenVINO and for NumPy.
        rows: Queries.
        columns: Of a value.
        precision: The hint.
        repeats: Repeats of the operand, in OpenVINO only.
    """
    rng = np.random.default_rng(0)
    shapes = (1, 2, rows, 64), (1, 2, 40, 64), (1, 2, 40, columns)
    query, key, value = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    q, k, v, o = (ops.parameter(list(x.shape), ov.Type(x.dtype)) for x in (query, key, value, operand))
    repeated = o if repeats is None else ops.tile(o, ops.constant(np.array(repeats)))
    scores, expected = ops.matmul(q, k, False, True), query @ key.swapaxes(-1, -2)
    row = operand.shape[-1] > 1
    if row:
        scores, expected = join(ops, scores, repeated), join(None, expected, operand)
    expected = np.exp(expected - expected.max(-1, keepdims=True))
    result, expected = ops.matmul(ops.softmax(scores, -1), v, False, False), expected / expected.sum(-1, keepdims=True)
    expected = expected @ value
    if not row:
        result, expected = join(ops, result, repeated), join(None, expected, operand)
    model = ov.Model([result], [q, k, v, o])
    compiled = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    found = compiled([query, key, value, operand])[0]
    return np.abs(found - expected).max() / np.abs(expected).max()


def added(library, x, operand):
    return library.add(x, operand) if library else x + operand


def chosen(library, x, operand):
    if library:
        return library.select(operand, x, library.constant(np.float32(0)))
    return np.where(operand, x, 0)


@pytest.mark.parametrize(("rows", "columns", "right"), [(32, 192, True), (33, 16, True), (33, 192, False)])
def test_a_column_behind_attention_is_read_wrongly_where_the_product_has_blocks(rows, columns, right) -> None:
    column = np.random.default_rng(1).random((1, 1, rows, 1)) > 0.3
    assert (attention(column, chosen, rows, columns, "f32") < 1e-4) == right
    assert attention(column, chosen, rows, columns, "f32", [1, 1, 1, columns]) < 1e-4


@needs_bf16
@pytest.mark.parametrize("rows", [1, 33])
def test_a_row_added_to_scores_in_bfloat16_makes_them_nan(rows) -> None:
    row = np.random.default_rng(1).standard_normal((1, 1, 1, 40)).astype(np.float32)
    assert not attention(row, added, rows, 64, "bf16") < 0.1
    assert attention(row, added, rows, 64, "bf16", [1, 2, 1, 1]) < 0.1


GATED = """
import sys
import numpy as np, openvino as ov
from openvino import opset15 as ops

RANDOM = np.random.default_rng(0)

def product(x, rows, columns):
    weights = ops.constant(RANDOM.random((columns, rows)).astype(np.float32))
    flat = ops.reshape(x, ops.constant([8, rows]), False)
    turned = ops.transpose(weights, ops.constant([1, 0]))
    return ops.reshape(ops.matmul(flat, turned, False, False), ops.constant([1, 8, columns]), False)

x = ops.parameter([1, 8, 64], ov.Type.f32)
gated = ops.multiply(ops.gelu(product(x, 64, 128), "erf"), product(x, 64, 128))
if sys.argv[2] == "apart":
    gated = ops.maximum(gated, gated)
model = ov.Model([product(gated, 128, 64)], [x])
hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": sys.argv[1]}
ov.Core().compile_model(model, "CPU", hints)([np.ones((1, 8, 64), np.float32)])
"""


@needs_bf16
@pytest.mark.parametrize(
    ("threads", "how", "ends"),
    [("1", "joined", -signal.SIGFPE if HAS_AMX else 0), ("2", "joined", 0), ("1", "apart", 0)],
)
def test_a_gated_product_on_one_thread_ends_the_process(threads, how, ends) -> None:
    assert subprocess.run([sys.executable, "-c", GATED, threads, how], check=False).returncode == ends


def _projected_attention(precision: str, cured: bool, transposed_back: bool) -> float:
    """Returns the largest difference of attention of 12 queries in 12 heads, relative to the largest value."""
    rng = np.random.default_rng(0)
    shapes = (2, 12, 12 * 64), (2, 12, 20, 64), (2, 12, 20, 64)
    query, key, value = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    q, k, v = (ops.parameter(list(x.shape), ov.Type.f32) for x in (query, key, value))
    order = ops.constant(np.array([0, 2, 1, 3]))
    heads = ops.transpose(ops.reshape(q, ops.constant(np.array([2, 12, 12, 64])), False), order)
    product = ops.matmul(heads, k, False, True)
    result = ops.matmul(ops.softmax(ops.multiply(product, ops.constant(np.float32(0.125))), -1), v, False, False)
    model = ov.Model([ops.transpose(result, order) if transposed_back else result], [q, k, v])
    if cured:
        repeat_attention_operands(model, PassContext())
    scores = query.reshape(2, 12, 12, 64).swapaxes(1, 2) @ key.swapaxes(-1, -2) * 0.125
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ value
    expected = expected.swapaxes(1, 2) if transposed_back else expected
    got = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})([query, key, value])[0]
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("precision", ["f32", pytest.param("bf16", marks=needs_bf16)])
def test_as_many_queries_as_heads(precision: str) -> None:
    assert max(_projected_attention(precision, False, back) for back in (False, True)) > 0.1
    assert max(_projected_attention(precision, True, back) for back in (False, True)) < 0.02


@needs_bf16
@pytest.mark.parametrize("rounded", [False, True])
def test_a_computed_mask_that_two_layers_share(rounded: bool) -> None:
    """OpenVINO adds -1e6 in each layer to what it stored in bfloat16, 999,424: -576 instead of 0."""
    query, key, mask = (ops.parameter(shape, ov.Type.f32) for shape in ([2, 2, 33, 64], [2, 2, 64, 33], [2, 33]))
    results = [query]
    for _ in range(2):
        keys = ops.unsqueeze(ops.unsqueeze(mask, 1), 2)
        hidden = ops.multiply(ops.subtract(np.float32(1), keys), np.float32(-1e6))
        weights = ops.softmax(ops.add(ops.matmul(results[-1], key, False, False), hidden), 3)
        results.append(ops.matmul(weights, key, False, True))
    model = ov.Model(results[1:], [query, key, mask])
    if rounded:
        round_masks(model, PassContext())
    random = np.random.default_rng(0)
    values = [random.standard_normal(shape, dtype=np.float32) for shape in ([2, 2, 33, 64], [2, 2, 64, 33])]
    values.append((np.arange(33) < np.array([[33], [20]])).astype(np.float32))
    exact, narrow = (
        CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision})(values)[0]
        for precision in ("f32", "bf16")
    )
    assert bool(np.abs(exact - narrow).max() < 0.1 * np.abs(exact).max()) is rounded


@needs_bf16
@pytest.mark.parametrize("limited", [False, True])
def test_masks_beyond_bfloat16(limited: bool) -> None:
    """The least float32 is minus infinity in bfloat16: a row of it is NaN behind a sum that is a kernel of its own."""
    scores, mask = ops.parameter([6, 8, 8], ov.Type.f32), ops.parameter([8, 8], ov.Type.f32)
    products = ops.reshape(ops.matmul(scores, scores, False, True), ops.constant(np.array([2, 3, 8, 8])), False)
    weights = ops.reshape(ops.softmax(ops.add(products, mask), -1), ops.constant(np.array([6, 8, 8])), False)
    model = ov.Model([ops.matmul(weights, scores, False, False)], [scores, mask])
    if limited:
        keep_masks_finite(model, PassContext())
    compiled = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    least = np.finfo(np.float32).min
    values = np.random.default_rng(0).standard_normal((6, 8, 8), dtype=np.float32)
    result = compiled([values, np.full((8, 8), least)])[0]
    assert np.isnan(result).all() != limited
    if limited:
        assert np.abs(result - values.mean(1, keepdims=True)).max() < 0.02
