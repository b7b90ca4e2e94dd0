"""Pins what the backend relies on in OpenVINO 2026.4: private names, and the defects that it works around."""

import inspect
import signal
import subprocess
import sys

import numpy as np
import openvino as ov
import openvino.torch
import pytest
import torch
from openvino import opset15 as ops
from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
from openvino.frontend.pytorch.torchdynamo.backend_utils import _get_device
from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose
from openvino.frontend.pytorch.torchdynamo.op_support import OperatorSupport
from torch import nn

from torchserve_openvino.backend.runtime.output_memory import computed_outputs
from torchserve_openvino.backend.upstream._openvino_private import ts_to_model
from torchserve_openvino.ops.openvino_values import exact_quotient

CORE = ov.Core()
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def run(build, *inputs: np.ndarray) -> np.ndarray:
    parameters = [ops.parameter(list(x.shape), ov.Type(x.dtype)) for x in inputs]
    model = ov.Model([build(*parameters)], parameters)
    return CORE.compile_model(model, "CPU", F32)(list(inputs))[0]


def test_the_tested_version() -> None:
    assert ov.__version__.startswith("2026.4."), "the private names below were read in OpenVINO 2026.4"


def test_support_table_of_the_stock_backend() -> None:
    names = OperatorSupport({})._support_dict
    assert len(names) == 259
    assert {"torch.ops.aten.relu.default", "_operator.getitem"} <= names.keys()
    assert all(isinstance(name, str) for name in names)


def test_operators_that_the_export_path_keeps_whole() -> None:
    kept = ops_to_not_decompose()
    assert len(kept) == 63 and torch.ops.aten.hardswish.default in kept


def test_decoder_takes_shapes_and_types_and_holds_its_nodes() -> None:
    assert {"input_shapes", "input_types"} <= inspect.signature(TorchFXPythonDecoder.__init__).parameters.keys()
    graph = torch.fx.symbolic_trace(lambda x: x)
    assert isinstance(TorchFXPythonDecoder(graph)._nodes, list)


def test_int64_is_computed_in_32_bits() -> None:
    """Why `passes/fx/int_range.py` limits int64 inputs."""
    x = np.array([2**40, 5], dtype=np.int64)
    assert run(lambda p: ops.add(p, p), x).tolist() == [0, 10]


def test_8_bit_arithmetic_saturates() -> None:
    x = np.array([200], dtype=np.uint8)
    assert run(lambda p: ops.add(p, p), x).tolist() == [255]


def test_float64_is_computed_in_float32() -> None:
    assert run(lambda p: ops.add(p, p), np.array([1.0000000001])).tolist() == [2.0]


def test_abs_of_an_integer_range_keeps_the_sign() -> None:
    """Why integer abs is decomposed."""
    start, stop, step = (ops.constant(np.array(v, dtype=np.int64)) for v in (-3, 2, 1))
    integers = ops.convert(ops.range(start, stop, step, output_type="f32"), "i64")
    parameter = ops.parameter([], ov.Type.f32)
    model = ov.Model([ops.result(ops.abs(integers)), ops.result(ops.exp(parameter))], [parameter])
    got = CORE.compile_model(model, "CPU", F32)([np.float32(0)])[0]
    assert got.tolist() == [-3, -2, -1, 0, 1]


def test_output_tensor_can_be_torch_memory() -> None:
    compiled = CORE.compile_model(ov.convert_model(torch.export.export(nn.ReLU(), (torch.ones(3),))), "CPU", F32)
    request = compiled.create_infer_request()
    x, out = torch.tensor([-1.0, 2.0, 3.0]), torch.empty(3)
    request.set_input_tensor(0, ov.Tensor(x.numpy(), shared_memory=True))
    request.set_output_tensor(0, ov.Tensor(out.numpy(), shared_memory=True))
    request.infer()
    assert out.tolist() == [0.0, 2.0, 3.0]


def stock(model, *inputs, **options):
    """Runs a model through OpenVINO's own backend."""
    compiled = torch.compile(model, backend="openvino", dynamic=False, options=options or None)
    with torch.no_grad():
        return compiled(*inputs)


def test_stock_backend_fails_on_a_plain_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    with pytest.raises(Exception, match="sources must not be empty|Guard failed on the same frame"), torch.no_grad():
        torch.compile(model, backend="openvino")(torch.randn(1, 3, 8, 8))


def test_stock_backend_does_not_take_an_unknown_property_for_an_error() -> None:
    x = torch.tensor([-1.0, 2.0])
    got = stock(nn.Sequential(nn.ReLU(), nn.Tanh()), x, aot_autograd=True, config={"NO_SUCH_PROPERTY": 1})
    torch.testing.assert_close(got, torch.tanh(torch.relu(x)))


def test_stock_disabled_ops_takes_one_spelling() -> None:
    OperatorSupport({"disabled_ops": ["torch.ops.aten.relu.default"]})
    with pytest.raises(KeyError):
        OperatorSupport({"disabled_ops": ["aten.relu.default"]})


def test_stock_device_takes_no_virtual_device() -> None:
    for device in ("AUTO", "cpu", "HETERO:CPU"):
        with pytest.raises(AssertionError):
            _get_device({"device": device})


def test_the_torchscript_frontend_shares_weights_keeps_the_order_and_knows_other_operators() -> None:
    weight = torch.randn(64, 64)

    class Net(nn.Module):
        def forward(
            self, unused: torch.Tensor, x: torch.Tensor, size: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.Tensor.view(x @ weight, size, 2, 32), x

    example = (torch.zeros(1), torch.zeros(3, 64), torch.tensor(3))
    model, _ = ts_to_model(torch.jit.trace(Net(), example, check_trace=False))
    assert [port.get_partial_shape().rank.get_length() for port in model.inputs] == [1, 2, 0]
    assert [port.get_partial_shape().rank.get_length() for port in model.outputs] == [3, 2]
    (found,) = [op for op in model.get_ops() if op.get_type_name() == "Constant" and op.get_output_shape(0) == [64, 64]]
    assert found.data.ctypes.data == weight.data_ptr()

    class Native(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0]

    with pytest.raises(Exception, match="No conversion rule found for operations: aten::native_layer_norm"):
        ts_to_model(torch.jit.trace(Native(), torch.zeros(2, 4), check_trace=False))


def test_integers_are_compared_and_divided_in_float32() -> None:
    """Why integers are limited to 2^24 (passes/fx/int_range.py)."""
    x = np.array([2**24, 2**24 + 1, 2**30 + 7], np.int32)
    assert run(ops.equal, x, x - 1).tolist() != (x == x - 1).tolist()
    assert run(ops.floor_mod, x, np.full(3, 7, np.int32)).tolist() != (x % 7).tolist()


def test_a_selection_rounds_integers_where_it_is_fused_with_others() -> None:
    """Addition alone is exact in 32 bits, but not when fused: an operator's name does not tell whether it is exact."""
    x = np.array([2**24 + 1, -(2**24) - 3] * 32, np.int32)
    one, zero = ops.constant(1, ov.Type.i32), ops.constant(0, ov.Type.i32)
    assert run(lambda a: ops.add(a, one), x).tolist() == (x + 1).tolist()
    fused = run(lambda a, b: ops.select(ops.greater(a, zero), ops.add(a, one), b), x, x)
    assert fused.tolist() != np.where(x > 0, x + 1, x).tolist()


def test_a_float_quotient_is_rounded_before_its_floor() -> None:
    one, tenth = np.array([1.0], np.float32), np.array([0.1], np.float32)
    assert torch.floor_divide(torch.from_numpy(one), torch.from_numpy(tenth)).tolist() == [9.0]
    assert run(lambda a, b: ops.floor(ops.divide(a, b)), one, tenth).tolist() == [10.0]
    assert abs(float(run(ops.floor_mod, one, tenth)[0])) < 1e-6


def test_nan_is_greater_than_anything_and_not_less() -> None:
    """Why ``x > y`` is rewritten as ``y < x`` (`passes/fx/comparisons.py`)."""
    x, y = np.array([np.nan, 1.0, np.nan], np.float32), np.array([1.0, np.nan, np.nan], np.float32)
    assert run(lambda a, b: ops.convert(ops.greater(a, b), "i32"), x, y).any()
    assert not run(lambda a, b: ops.convert(ops.less(a, b), "i32"), x, y).any()
    assert not run(lambda a, b: ops.convert(ops.less_equal(a, b), "i32"), x, y).any()


def test_a_reduction_of_symbolic_sizes_takes_the_shape_after_it_away() -> None:
    """Why such a reduction keeps its dimensions (`passes/fx/reduced_dimensions.py`)."""

    def shape(keep: bool) -> list[int]:
        p = ops.parameter([-1, -1, 1], ov.Type.f32)
        found = ops.reduce_sum(p, ops.constant(np.array([0])), keep)
        found = ops.squeeze(found, ops.constant(np.array([0]))) if keep else found
        model = ov.Model([ops.transpose(found, ops.constant(np.array([1, 0])))], [p])
        return list(CORE.compile_model(model, "CPU", F32)([np.ones((3, 5, 1), np.float32)])[0].shape)

    assert shape(keep=True) == [1, 5]
    assert shape(keep=False) == [5, 1]


def test_attention_of_a_closed_row_is_nan() -> None:
    """Why fully masked rows are set to 0 (`passes/fx/closed_rows.py`)."""
    q = np.ones((1, 1, 2, 4), np.float32)
    mask = np.array([[[[0.0, -np.inf], [-np.inf, -np.inf]]]], np.float32)
    got = run(lambda q, m: ops.scaled_dot_product_attention(q, q, q, m), q, mask)
    assert np.isfinite(got[0, 0, 0]).all() and np.isnan(got[0, 0, 1]).all()


def test_an_input_that_is_an_output_takes_its_memory() -> None:
    """Why such outputs are copied (`memory.computed_outputs`): OpenVINO reads the input from the output's memory."""
    parameter = ops.parameter([2, 4], ov.Type.f32)
    model = ov.Model([ops.result(parameter), ops.result(ops.softmax(parameter, 1))], [parameter])
    compiled = CORE.compile_model(model, "CPU", F32)
    request = compiled.create_infer_request()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    outs = [np.full((2, 4), 7.0, np.float32) for _ in range(2)]
    request.set_input_tensor(0, ov.Tensor(x, shared_memory=True))
    for position, out in enumerate(outs):
        request.set_output_tensor(position, ov.Tensor(out, shared_memory=True))
    request.infer()
    # OpenVINO may overwrite `x` too.
    assert not np.array_equal(outs[0], np.arange(8).reshape(2, 4))
    np.testing.assert_allclose(outs[1], 0.25)


def test_executed_graphs_say_what_each_layer_is() -> None:
    parameter = ops.parameter([2, 4], ov.Type.f32)
    reshaped = ops.reshape(parameter, ops.constant(np.array([4, 2])), False)
    outputs = [parameter, reshaped, ops.constant(np.ones(3, np.float32)), ops.exp(parameter)]
    compiled = CORE.compile_model(ov.Model([ops.result(each) for each in outputs], [parameter]), "CPU", F32)
    assert computed_outputs(compiled) == [False, False, False, True]


def test_interpolation_to_1_takes_the_first_value() -> None:
    """Why `ops/rules/images.py` decomposes it."""
    model = ov.convert_model(
        torch.export.export(nn.Upsample(size=(1, 1), mode="bilinear"), (torch.arange(36.0).reshape(1, 1, 6, 6),))
    )
    got = CORE.compile_model(model, "CPU", F32)([np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)])[0]
    assert got.item() != pytest.approx(17.5)


def test_packed_weights_are_looked_up_without_their_orientation() -> None:
    """Why `passes/ov/weight_packing.py` exists. If this fails, it may no longer be needed."""
    generator = np.random.default_rng(0)
    weight, x = generator.standard_normal((8, 8), np.float32), generator.standard_normal((4, 8), np.float32)
    parameter, constant = ops.parameter([4, 8], ov.Type.f32), ops.constant(weight)
    both = ops.matmul(ops.matmul(parameter, constant, False, True), constant, False, False)
    got = CORE.compile_model(ov.Model([both], [parameter]), "CPU", F32)(x)[0]
    packed_once = [np.allclose(got, x @ each @ each, atol=1e-3) for each in (weight, weight.T)]
    assert any(packed_once) and not np.allclose(got, x @ weight.T @ weight, atol=1e-3)


def test_a_reduction_of_integers_computes_what_is_behind_it_for_its_first_values_only() -> None:
    """Why `passes/ov/kernel_fusions.py` keeps the two apart."""
    x = np.ones((5, 1, 3), dtype=np.int64)

    def build(p: ov.Node) -> ov.Node:
        total = ops.reduce_sum(p, ops.constant(np.array([2])), False)
        return ops.multiply(total, ops.constant(np.int64(3)))

    assert run(build, x).reshape(-1).tolist() != [9] * 5


def test_a_reduction_of_three_dimensions_takes_numbers_of_other_channels() -> None:
    """Why `passes/ov/kernel_fusions.py` keeps the two apart; reductions of four dimensions are correct."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 1)).astype(np.float32)
    numbers = np.array([1, 10, 100], dtype=np.float32)

    def build(p: ov.Node) -> ov.Node:
        total = ops.reduce_sum(p, ops.constant(np.array([2])), False)
        return ops.multiply(total, ops.constant(numbers.reshape(3, *[1] * (len(p.shape) - 3))))

    expected = x.sum(2) * numbers[:, None]
    assert np.allclose(run(build, x), expected, atol=1e-3)
    assert not np.allclose(run(build, x[..., 0]), expected[..., 0], atol=1e-3)


@pytest.mark.parametrize(("shape", "wrong"), [((9, 3, 5), True), ((9, 5), False)])
def test_a_reduction_divided_by_a_number(shape, wrong) -> None:
    """Why `passes/ov/kernel_fusions.py` keeps the two apart. The frontend does not rewrite divisions."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(-1) / 3

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = ov.convert_model(torch.export.export(Model(), (x,)))
    got = CORE.compile_model(model, "CPU", F32)([x.numpy()])[0]
    assert np.allclose(got, Model()(x).numpy(), atol=1e-4) is not wrong


def test_a_product_of_tiny_matrices_mixes_up_the_numbers_for_each_column() -> None:
    """Why `passes/ov/kernel_fusions.py` keeps the two apart."""

    def differs(size: int) -> bool:
        x, y = np.random.default_rng(0).uniform(0.5, 1, (2, size, size)).astype(np.float32)
        numbers = np.arange(1, 1 + size, dtype=np.float32)
        got = run(lambda a, b: ops.multiply(ops.relu(ops.matmul(a, b, False, False)), ops.constant(numbers)), x, y)
        return not np.allclose(got, x @ y * numbers, atol=1e-3)

    assert [differs(size) for size in (2, 3, 4)] == [True, False, False]


def test_the_absolute_value_of_a_concatenation_is_taken_of_its_parts() -> None:
    """Why `passes/ov/kernel_fusions.py` keeps the two apart."""
    x = np.array([-1.0, 2.0], dtype=np.float32)

    def build(p: ov.Node) -> ov.Node:
        both = ops.concat([p, p], 0)
        return ops.add(both, ops.abs(both))

    assert run(build, x).tolist() == [2, 4, 2, 4]


def test_the_absolute_value_of_a_row_of_weights_times_a_constant_is_left_out() -> None:
    """Why `passes/ov/kernel_fusions.py` inserts an operator before the absolute value."""
    weights, shift = np.array([-1.0, 0.25], dtype=np.float32), ops.constant(np.float32(0.25))

    def build(p: ov.Node) -> ov.Node:
        twice = ops.multiply(ops.constant(weights), ops.convert(ops.constant(np.int64(2)), "f32"))
        return ops.concat([p, ops.add(ops.abs(twice), shift)], 0)

    assert run(build, weights).tolist() == [-1, 0.25, -1.75, 0.75]


def test_the_number_of_kernels_kept_is_taken_though_no_list_names_it() -> None:
    """`config/openvino/properties.py` lists it, `backend/runtime/build.py` sets it."""
    name = "CPU_RUNTIME_CACHE_CAPACITY"
    parameter = ops.parameter([-1, 8], ov.Type.f32)
    model = ov.Model([ops.relu(parameter)], [parameter])
    assert name not in CORE.get_property("CPU", "SUPPORTED_PROPERTIES")
    CORE.compile_model(model, "CPU", F32 | {name: 10})
    with pytest.raises(RuntimeError, match=name):
        CORE.compile_model(model, "CPU", F32 | {name: "x"})


CRASH = """
import numpy as np, openvino as ov, sys
from openvino import opset15 as ops

def weights(*shape):
    return ops.constant(np.ones(shape, dtype=np.float32))

def of_layers():
    x = ops.parameter([8, 16], ov.Type.f32)
    h = ops.exp(x)
    mlp = ops.matmul(ops.relu(ops.matmul(h, weights(16, 32), False, False)), weights(32, 16), False, False)
    # `h` and the chain meet, and the chain has a second consumer.
    return ov.Model([ops.multiply(ops.add(h, mlp), ops.tanh(mlp))], [x])

def minus_an_input():
    # The plugin makes it the sum with the input's negative.
    x, y = ops.parameter([4, 2, 2, 4], ov.Type.f32), ops.parameter([4], ov.Type.f32)
    order = ops.constant(np.array([0, 2, 1, 3]))
    heads = ops.transpose(x, order)
    attended = ops.transpose(ops.scaled_dot_product_attention(heads, heads, heads), order)
    return ov.Model([ops.subtract(attended, y)], [x, y])

model, device = globals()[sys.argv[1]](), sys.argv[2]
core = ov.Core()
core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
if len(sys.argv) > 3:
    core.set_property("CPU", {"SNIPPETS_MODE": sys.argv[3]})
core.compile_model(model, device)
"""


@pytest.mark.parametrize("model", ["of_layers", "minus_an_input"])
@pytest.mark.parametrize("device", ["CPU", "AUTO", "HETERO:CPU"])
def test_fusing_elementwise_operators_with_a_finished_chain_ends_the_process(device, model) -> None:
    def status(*arguments: str) -> int:
        command = [sys.executable, "-c", CRASH, model, device, *arguments]
        return subprocess.run(command, check=False, capture_output=True).returncode

    assert status() == -signal.SIGSEGV, "OpenVINO fixed this crash: fused_chains.py can be removed"
    assert status("DISABLE") == 0


TO_SCALAR = """
import sys
import numpy as np
import openvino as ov
from openvino import opset15 as ops

left, right = ops.parameter([1, 3], np.float32), ops.parameter([3, 1], np.float32)
product = ops.matmul(left, right, False, False)
if sys.argv[1] == "reshape":
    scalar = ops.reshape(product, ops.constant(np.zeros(0, np.int64)), False)
else:
    scalar = ops.squeeze(product, ops.constant(np.array([0, 1])))
ov.Core().compile_model(ov.Model([scalar], [left, right]), "CPU")
"""


def test_reshaping_a_product_to_a_scalar_ends_the_process_and_squeezing_it_does_not() -> None:
    def status(how: str) -> int:
        return subprocess.run([sys.executable, "-c", TO_SCALAR, how], check=False, capture_output=True).returncode

    fixed = "OpenVINO fixed this crash: kernel_fusions.py no longer needs to squeeze"
    assert status("reshape") == -signal.SIGSEGV, fixed
    assert status("squeeze") == 0


@pytest.mark.parametrize("padding", [0, 1])
def test_a_strided_convolution_of_single_pixels_loses_its_padding(padding) -> None:
    x = ops.parameter([1, 1, 3, 3], np.float32)
    kernel = ops.constant(np.ones((1, 1, 1, 1), np.float32))
    made = ops.convolution(ops.sigmoid(x), kernel, [2, 2], [padding] * 2, [padding] * 2, [1, 1])
    answer = CORE.compile_model(ov.Model([made], [x]), "CPU", F32)([np.zeros((1, 1, 3, 3), np.float32)])[0]
    right = list(answer.shape) == list(made.get_output_shape(0))
    fixed = "OpenVINO fixed this: kernel_fusions.py no longer needs to separate such convolutions"
    assert right is (padding == 0), fixed


def test_a_quotient_is_rounded_twice_unless_it_is_marked() -> None:
    """Why `exact_quotient` sets the plugin's own mark."""
    x = np.repeat(np.arange(1, 200, dtype=np.float32), 200)
    y = np.tile(np.arange(1, 201, dtype=np.float32), 199)
    assert (run(lambda a, b: ops.divide(a, b), x, y) != x / y).any()
    assert (run(exact_quotient, x, y) == x / y).all()


def test_reductions_of_nothing() -> None:
    """Why `ops.support` refuses averages of what may be empty, and `lowering/checks.py` adds a 1 to checks of it."""
    for build, expected in ((ops.reduce_mean, 0), (ops.reduce_min, np.iinfo(np.int32).max)):
        x = ops.parameter([-1], np.int32)
        values = ops.convert(x, "f32") if expected == 0 else x
        compiled = CORE.compile_model(ov.Model([build(values, np.array([0]), True)], [x]), "CPU", F32)
        assert compiled([np.zeros(0, dtype=np.int32)])[0] == expected


@pytest.mark.parametrize("length", [20, -1])
def test_embedding_bags_with_weights_of_an_open_length_do_not_compile(length) -> None:
    """Why `ops/rules/embedding_bag.py` looks these rows up first."""
    table = ops.constant(np.ones((100, 8), np.float32))
    parameters = [
        ops.parameter([length], np.int64), ops.parameter([4], np.int64), ops.parameter([length], np.float32),
    ]  # fmt: skip
    indices, starts, weights = parameters
    bags = ops.embedding_bag_offsets(table, indices, starts, reduction="sum", per_sample_weights=weights)
    model = ov.Model([bags], parameters)
    if length > 0:
        CORE.compile_model(model, "CPU", F32)
    else:
        with pytest.raises(RuntimeError, match="to_shape was called on a dynamic shape"):
            CORE.compile_model(model, "CPU", F32)


def test_a_scatter_of_rows_takes_the_maximum_of_rows_with_the_same_index() -> None:
    """However many threads: embedding bags rely on it."""
    index, rows = np.random.randint(0, 2, (50_000, 1)), np.random.randn(50_000, 16).astype(np.float32)
    empty = np.full((2, 16), -np.inf, np.float32)
    parameters = [ops.parameter([-1, 1], np.int64), ops.parameter([-1, 16], np.float32)]
    model = ov.Model([ops.scatter_nd_update(ops.constant(empty), *parameters, "max")], parameters)
    compiled = CORE.compile_model(model, "CPU", {**F32, "INFERENCE_NUM_THREADS": 8})
    np.maximum.at(empty, index[:, 0], rows)
    for _ in range(5):
        assert np.array_equal(compiled([index, rows])[0], empty)


def test_data_of_a_bfloat16_constant_are_other_numbers() -> None:
    """Why `array_of` does not use it."""
    constant = ov.op.Constant(ov.Type.bf16, ov.Shape([1]), [-1.0])
    assert constant.data.tolist() == [-1.875] and constant.get_data(dtype=np.float32).tolist() == [-1.0]
