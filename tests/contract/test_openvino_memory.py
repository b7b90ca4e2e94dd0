"""Pins where OpenVINO 2026.4's CPU plugin accesses memory out of bounds, or loses an error."""

import subprocess
import sys

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

from torchserve_openvino.passes.ov.shared_views import chain_views
from torchserve_openvino.passes.pass_context import PassContext

X = np.ones((2, 3), np.float32)
BEYOND = np.array([[3], [0]], np.int64)


def gathers(threads: int) -> ov.InferRequest:
    x, index = ops.parameter([2, 3], ov.Type.f32), ops.parameter([2, 1], ov.Type.i64)
    model = ov.Model([ops.gather_elements(x, index, 1)], [x, index])
    request = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads}).create_infer_request()
    request.set_input_tensor(0, ov.Tensor(X))
    request.set_input_tensor(1, ov.Tensor(BEYOND))
    request.get_output_tensor(0).data[...] = -7
    return request


def test_with_one_thread_infer_loses_the_error_of_a_kernel() -> None:
    """Why `backend/runtime/execute.py` then infers in another thread."""
    request = gathers(1)
    request.infer()
    assert (request.get_output_tensor(0).data == -7).all()


def test_asynchronously_the_error_arrives() -> None:
    request = gathers(1)
    request.start_async()
    with pytest.raises(RuntimeError, match="exceed data size"):
        request.wait()


def test_with_two_threads_it_arrives() -> None:
    with pytest.raises(RuntimeError, match="exceed data size"):
        gathers(2).infer()


PROGRAM = """
import numpy as np, openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.passes.ov.shared_views import chain_views
x, index = ops.parameter([2, 3], ov.Type.f32), ops.parameter([2, 1], ov.Type.i64)
model = ov.Model([ops.OPERATION], [x, index])
ov.Core().compile_model(model, "CPU")([np.ones((2, 3), np.float32), np.array([[BEYOND], [0]], np.int64)])
"""
SCATTER = "scatter_elements_update(x, index, np.ones((2, 1), np.float32), np.int64(1))"


@pytest.mark.parametrize(("operation", "beyond"), [("gather_nd(x, index)", 10**8), (SCATTER, -(10**8))])
def test_kernels_leave_the_memory_of_a_tensor(operation, beyond) -> None:
    """Why `passes/fx/checks.py` replaces an index that fails its check with 0."""
    program = PROGRAM.replace("OPERATION", operation).replace("BEYOND", str(beyond))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode < 0, f"the process did not crash (exit code {done.returncode}): {done.stderr[-300:]}"


def test_an_output_of_unknown_shape_that_is_an_input_is_written_to_the_last_call_s_input() -> None:
    """Why such a request is used only once (`backend/runtime/execute.py`)."""
    x, y = ops.parameter([-1], ov.Type.f32), ops.parameter([1], ov.Type.f32)
    model = ov.Model([ops.convert(x, "f32").output(0), ops.relu(y).output(0)], [x, y])
    request = ov.Core().compile_model(model, "CPU").create_infer_request()
    given = [np.full(4, float(i), np.float32) for i in range(4)]
    for each in given:
        request.set_input_tensor(0, ov.Tensor(each, shared_memory=True))
        request.set_input_tensor(1, ov.Tensor(np.zeros(1, np.float32)))
        request.infer()
    assert [each.tolist() for each in given] != [[float(i)] * 4 for i in range(4)]


JOINED = """
import numpy as np, openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.passes.ov.shared_views import chain_views
x, b = ops.parameter([2, 4, 5, 5], ov.Type.f32), ops.parameter([2, 4, 5, 5], ov.Type.f32)
RESULTS
ov.Core().compile_model(ov.Model(results, [x, b]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
"""
JOINS = {
    "attention with two users": """
scores = ops.softmax(ops.matmul(x, x, False, True), -1)
found = ops.matmul(scores, x, False, False)
results = [found, ops.add(found, ops.relu(b))]
""",
    "attention that becomes larger": """
row = ops.reduce_max(x, ops.constant([2]), keep_dims=True)
scores = ops.softmax(ops.matmul(row, row, False, True), -1)
larger = ops.divide(ops.matmul(scores, row, False, False), ops.abs(b))
results = [ops.exp(larger), ops.sin(larger)]
""",
    "group normalization beside a kernel": """
ones = ops.constant(np.ones(4, np.float32))
results = [ops.add(ops.group_normalization(x, ones, ones, 2, 1e-5), ops.relu(b))]
""",
}


@pytest.mark.parametrize("name", JOINS)
def test_a_joined_kernel_ends_the_process_while_it_is_compiled(name) -> None:
    """Why `passes/ov/kernel_fusions.py` exists."""
    program = JOINED.replace("RESULTS", JOINS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode < 0, f"the process did not crash (exit code {done.returncode}): {done.stderr[-300:]}"


def answers(result: ov.Node, x: ov.Node, given: list[np.ndarray]) -> list[np.ndarray]:
    compiled = ov.Core().compile_model(ov.Model([result], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    return [request.infer([each])[0].copy() for each in given]


def test_a_constant_that_is_not_folded_is_overwritten() -> None:
    """Why `passes/ov/constant_parts.py` exists."""
    x, zero = ops.parameter([3, 4], np.float32), ops.constant(np.zeros(1, np.int64))
    made = ops.roll(ops.constant(np.ones((3, 4), np.float32) * 2), zero, zero)
    given = np.ones((3, 4), np.float32)
    first, *_, last = answers(ops.power(made, ops.clamp(x, -2, 2)), x, [given, given * 2, given * -1, given])
    assert np.allclose(first, 2)
    assert not np.allclose(last, 2), "OpenVINO fixed this: constant_parts.py can be removed"


@pytest.mark.parametrize("channels", [2, 3])
def test_a_mean_of_few_channels_takes_in_what_its_memory_held(channels) -> None:
    """Why `passes/ov/kernel_fusions.py` separates pooling from such a mean."""
    x = ops.parameter([2, channels, 6, 6], np.float32)
    pooled = ops.avg_pool(x, [2, 2], [0, 0], [0, 0], [2, 2], True, "floor", "explicit")
    mean = ops.reduce_mean(pooled, ops.constant([0, 2, 3]), False)
    if not _in_blocks_of_16(ov.Model([mean], [x])):
        pytest.skip("no AVX-512: blocks hold 8 channels")
    given = np.ones((2, channels, 6, 6), np.float32)
    *_, last = answers(mean, x, [given, given * 1000, given])
    assert not np.allclose(last, 1), "OpenVINO fixed this: kernel_fusions.py no longer needs to separate the mean"


def _in_blocks_of_16(model: ov.Model) -> bool:
    runtime = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).get_runtime_model()
    return any("16b" in str(node.get_rt_info()["outputLayouts"].value) for node in runtime.get_ordered_ops())


def test_views_of_a_value_that_a_convolution_takes_transposed() -> None:
    """Memory that a transposed convolution still reads is taken for free where its source has two views."""

    def model() -> ov.Model:
        rng = np.random.default_rng(0)
        x = ops.parameter([3, 2, 64], np.float32)
        value = ops.relu(x)
        weights = ops.constant(rng.standard_normal((16, 64, 3)).astype(np.float32))
        convolved = ops.convolution(ops.transpose(value, [0, 2, 1]), weights, [1], [1], [1], [1])
        rows, columns = ops.reshape(value, [3, 1, 128], False), ops.reshape(value, [3, 128, 1], False)
        return ov.Model([convolved, ops.matmul(rows, columns, False, False)], [x])

    def worst(graph: ov.Model) -> float:
        request = ov.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        alone = ov.compile_model(ov.Model([graph.outputs[0]], graph.get_parameters()), "CPU",
                                 {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()  # fmt: skip
        rng, found = np.random.default_rng(1), 0.0
        for _ in range(3):
            x = rng.standard_normal((3, 2, 64)).astype(np.float32)
            found = max(found, float(np.abs(request.infer([x])[0] - alone.infer([x])[0]).max()))
        return found

    assert worst(model()) > 0.1, "OpenVINO computes it rightly: passes/ov/shared_views.py can go"
    cured = model()
    chain_views(cured, PassContext())
    assert worst(cured) < 1e-5
