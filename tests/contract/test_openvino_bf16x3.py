"""Pins what the precision bf16x3 relies on in OpenVINO 2026.4: an IR form, and what the CPU plugin makes of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset15 as ops

from torchserve_openvino.backend.runtime.build import kernels_of
from torchserve_openvino.backend.upstream import _openvino_private as relaxed
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.config.openvino.precisions import no_bf16x3
from torchserve_openvino.passes.ov.bf16x3 import multiply_in_bf16x3
from torchserve_openvino.passes.pass_context import PassContext

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
MATMUL = {"transpose_a": "false", "transpose_b": "true"}
HERE = no_bf16x3("CPU")
needs_amx = pytest.mark.skipif(HERE is not None, reason=f"bf16x3 {HERE}")


def bf16(values: np.ndarray) -> ov.Output:
    bits = torch.from_numpy(values).bfloat16()
    tensor = ov.Tensor(bits.view(torch.int16).numpy(), ov.Shape(list(values.shape)), ov.Type.bf16)
    return ov.op.Constant(tensor, shared_memory=False).output(0)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().double().numpy()


def product(x: np.ndarray, w: np.ndarray, relax: bool) -> ov.CompiledModel:
    parameter = ops.parameter(list(x.shape), np.float32)
    first = ops.convert(parameter, "bf16").output(0)
    result = (
        relaxed.product_in_f32("MatMul", first, bf16(w), MATMUL) if relax else ops.matmul(first, bf16(w), False, True)
    )
    return core().compile_model(ov.Model([ops.convert(result, "f32")], [parameter]), "CPU", F32)


def in_bf16x3(model: ov.Model) -> tuple[ov.Model, dict[str, int]]:
    """Returns a copy with products in bf16x3, and their share."""
    changed, context = model.clone(), PassContext()
    multiply_in_bf16x3(changed, context)
    return changed, context.products


@needs_amx
def test_a_type_relaxed_product_of_bf16_is_not_rounded_and_runs_on_amx() -> None:
    x, w = numbers(64, 384), numbers(256, 384)
    exact = rounded(x) @ rounded(w).T
    compiled = product(x, w, relax=True)
    assert np.abs(compiled(x)[0] - exact).max() < 1e-6 * np.abs(exact).max()
    kernels = [kernel for kernel in kernels_of(compiled) if kernel.kind == "FullyConnected"]
    assert [(kernel.primitive, kernel.precision) for kernel in kernels] == [("brgemm_avx512_amx_bf16", "bf16")]
    # Why the form is needed: the result of a MatMul has the type of its operands.
    assert np.abs(product(x, w, relax=False)(x)[0] - exact).max() > 1e-3 * np.abs(exact).max()


@needs_amx
def test_a_transposition_before_it_makes_it_round() -> None:
    """Why the pass puts none there: the plugin fuses it to a MatMul of its own, which has the type of its operands."""
    x, w = numbers(64, 384), numbers(384, 256)
    parameter = ops.parameter([64, 384], np.float32)
    turned = ops.transpose(bf16(w), ops.constant(np.array([1, 0]))).output(0)
    result = relaxed.product_in_f32("MatMul", ops.convert(parameter, "bf16").output(0), turned, MATMUL)
    model = ov.Model([ops.convert(result, "f32")], [parameter])
    exact = rounded(x) @ rounded(w)
    error = np.abs(core().compile_model(model, "CPU", F32)(x)[0] - exact).max()
    assert error > 1e-3 * np.abs(exact).max()


def test_only_an_ir_creates_it_and_only_with_the_plugin_as_an_extension() -> None:
    text = relaxed._text("MatMul", 2, 2, tuple(MATMUL.items()))
    with pytest.raises(RuntimeError, match=r"type_relaxed_opset1|MatMul"):
        ov.Core().read_model(text, ov.Tensor(np.zeros(1, np.uint8)))
    extended = ov.Core()
    extended.add_extension(str(relaxed.plugin_library()))
    (node,) = [n for n in extended.read_model(text, ov.Tensor(np.zeros(1, np.uint8))).get_ops() if "MatMul" in str(n)]
    assert node.get_output_element_type(0) == ov.Type.f32


def linear(rows: int = 64, inner: int = 384, columns: int = 512) -> ov.Model:
    parameter = ops.parameter([2, rows, inner], np.float32)
    shifted = ops.multiply(parameter, ops.constant(np.float32(1.5)))
    return ov.Model(
        [ops.gelu(ops.matmul(shifted, ops.constant(numbers(columns, inner)), False, True), "erf")], [parameter]
    )


@needs_amx
def test_halves_are_written_and_read_in_place_and_sums_are_fused() -> None:
    """Why both halves are one value: neither the concatenation nor the splits run."""
    model, _ = in_bf16x3(linear())
    compiled = core().compile_model(model, "CPU", {**F32, "PERF_COUNT": True})
    compiled(numbers(2, 64, 384))
    facts = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = {name: str(node.get_rt_info()[name].astype(str)) for name in ("layerType", "execTimeMcs")}
        facts.setdefault(info["layerType"], []).append(info["execTimeMcs"])
    assert set(facts["Concatenation"]) | set(facts["Split"]) == {"not_executed"}
    assert len(facts["FullyConnected"]) == 2 and len(facts["Subgraph"]) == 2
    assert not facts.keys() & {"Convert", "Eltwise", "Reorder"}


@needs_amx
def test_convolutions_are_added_in_place() -> None:
    parameter = ops.parameter([1, 256, 14, 14], np.float32)
    weights = ops.constant(numbers(256, 256, 3, 3))
    convolution = ops.convolution(ops.relu(parameter), weights, [1, 1], [1, 1], [1, 1], [1, 1])
    model, share = in_bf16x3(ov.Model([ops.relu(convolution)], [parameter]))
    assert share["bf16x3"] == 1
    kernels = kernels_of(core().compile_model(model, "CPU", F32))
    convolutions = [kernel.primitive for kernel in kernels if kernel.kind == "Convolution"]
    assert convolutions == ["brgconv_avx512_amx_bf16"] * 3
    assert not {"Eltwise", "Convert", "Concatenation", "Split"} & {kernel.kind for kernel in kernels}


@needs_amx
def test_a_blob_needs_no_extension(tmp_path: Path) -> None:
    model, _ = in_bf16x3(linear())
    compiled = core().compile_model(model, "CPU", F32)
    np.save(tmp_path / "y.npy", compiled(numbers(2, 64, 384))[0])
    (tmp_path / "blob").write_bytes(compiled.export_model().getbuffer())
    code = (
        "import sys, numpy as np, openvino as ov\n"
        "blob = ov.Tensor(np.fromfile(sys.argv[1] + '/blob', np.uint8))\n"
        "compiled = ov.Core().import_model(blob, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n"
        "x = np.random.default_rng(450).standard_normal((2, 64, 384)).astype(np.float32)\n"
        "assert np.array_equal(compiled(x)[0], np.load(sys.argv[1] + '/y.npy'))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)


def test_the_instruction_set_says_whether_there_is_amx() -> None:
    """Also where the CPU has it, and the variable forbids it."""
    code = (
        "from torchserve_openvino.config.openvino.precisions import instruction_set, no_bf16x3\n"
        "print(instruction_set(), '|', no_bf16x3('CPU'))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Intel") and "AMX" not in said.partition("|")[0]
    assert "needs a CPU with AMX" in said
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        assert (" amx_bf16 " in flags) == (HERE is None)
