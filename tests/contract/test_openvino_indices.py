"""Pins what OpenVINO 2026.4's CPU plugin does with an index beyond the end: the errors that get lost, and the memory."""

import subprocess
import sys

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops

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
    """Why `backend/execute.py` asks another thread then."""
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
x, index = ops.parameter([2, 3], ov.Type.f32), ops.parameter([2, 1], ov.Type.i64)
model = ov.Model([ops.OPERATION], [x, index])
ov.Core().compile_model(model, "CPU")([np.ones((2, 3), np.float32), np.array([[BEYOND], [0]], np.int64)])
"""
SCATTER = "scatter_elements_update(x, index, np.ones((2, 1), np.float32), np.int64(1))"


@pytest.mark.parametrize(("operation", "beyond"), [("gather_nd(x, index)", 10**8), (SCATTER, -(10**8))])
def test_kernels_leave_the_memory_of_a_tensor(operation, beyond) -> None:
    """Why an index that fails its question is 0 in `backend/checks.py`: 0.4 GB from here is nobody's memory."""
    program = PROGRAM.replace("OPERATION", operation).replace("BEYOND", str(beyond))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode < 0, f"the process lives (exit code {done.returncode}): {done.stderr[-300:]}"
