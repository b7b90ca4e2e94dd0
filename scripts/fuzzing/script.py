"""Writes a failure as a standalone script."""

from __future__ import annotations

import torch

from fuzzing.program import Input, Program
from fuzzing.values import arguments

_MOST_LITERAL = 64


def script(program: Program, title: str) -> str:
    """Python source with the model and its calls, which prints eager's answers beside ours.

    Args:
        program: The failing program.
        title: Comment at the top.
    """
    mode = program.mode
    comment = "\n".join(f"# {line}" for line in title.splitlines())
    if any(tensor.numel() > _MOST_LITERAL for tensor in arguments(program, "A", False)):
        comment += "\n# Larger inputs are others here; fuzz_models.py --replay runs the stored case with its own."
    how = f"dynamic={mode.dynamic}, backend={mode.backend!r}, options={mode.compile_options!r}"
    compiled = f"tov.compile(model, {how})"
    if mode.open:
        axes = f"OpenAxes({program.open_axes}, {mode.open == 'ones'})"
        compiled = f"compile_with(model, CompileSpec({how}, open_axes={axes}))"
    context = {"no_grad": "torch.no_grad()", "inference_mode": "torch.inference_mode()", "grad": "torch.enable_grad()"}
    letters = sorted(set(mode.steps) - {"W"})
    return f"""{comment}
# In the steps, a W changes the weights; every other letter is a call with the inputs of that name.
import torch
import torch.nn.functional as F
from torch import cond
from torch.ao.quantization.fx import _decomposed

import torchserve_openvino as tov
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.spec import OpenAxes


{program.source()}

def make():
    torch.manual_seed({program.seed})
    return Model().train({mode.train})


def soil():
    for _ in range(8):
        [torch.full((n,), 1e20) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) for _ in range(20)]


def change(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5).add_(0.125)


{chr(10).join(_inputs(program, letter) for letter in letters)}
inputs = {{{", ".join(f"{letter!r}: inputs_{letter}" for letter in letters)}}}
eager, model = make(), make()
compiled = {compiled}{".freeze()" if mode.frozen else ""}
for step in {mode.steps!r}:
    for name, run, module in (("eager", eager, eager), ("ours ", compiled, model)):
        if step == "W":
            change(module)
            continue
        given = inputs[step]()
        soil()
        try:
            with {context[mode.grad]}:
                print(step, name, run(*given))
        except Exception as error:
            print(step, name, "raises", type(error).__name__, str(error)[:300])
summary = compiled.report.summary
print("coverage", summary.coverage, "fallbacks", summary.fallbacks)
for name, value in eager.named_buffers():
    print(name, "eager", value.tolist(), "ours", dict(model.named_buffers())[name].tolist())
"""


def _inputs(program: Program, step: str) -> str:
    """A function that makes the inputs of a call anew, since a call may write to them."""
    args = arguments(program, step, program.mode.grad == "grad")
    names = [spec.name for spec in program.inputs]
    lines = []
    for spec, tensor in zip(program.inputs, args, strict=True):
        first = next(name for name, other in zip(names, args, strict=True) if other is tensor)
        lines.append(f"    {spec.name} = {first if first != spec.name else _literal(spec, tensor)}")
    if any("=generator" in line for line in lines):
        lines.insert(0, "    generator = torch.Generator().manual_seed(0)")
    return "\n".join([f"def inputs_{step}():", *lines, f"    return [{', '.join(names)}]", "", ""])


def _literal(spec: Input, tensor: torch.Tensor) -> str:
    dtype = (
        "" if tensor.dtype in (torch.float32, torch.int64, torch.bool) and tensor.numel() else f", dtype={tensor.dtype}"
    )
    if tensor.numel() > _MOST_LITERAL:
        code = f"torch.randn({tuple(tensor.shape)}, generator=generator).to({tensor.dtype})"
    else:
        values = repr(
            [round(v, 4) for v in tensor.reshape(-1).tolist()]
            if tensor.is_floating_point()
            else tensor.reshape(-1).tolist()
        )
        values = values.replace("-inf", '-float("inf")')
        code = f"torch.tensor({values}{dtype})"
        if tensor.dim() != 1:
            code += f".reshape({', '.join(map(str, tensor.shape)) or '()'})"
    if spec.layout == "strided" and tensor.dim():
        code += ".repeat_interleave(2, dim=-1)[..., ::2]"
    if spec.layout == "transposed" and tensor.dim() > 1:
        code += ".transpose(-1, -2).contiguous().transpose(-1, -2)"
    if spec.layout == "offset":
        before = f"torch.zeros(3, dtype={tensor.dtype})"
        code = f"torch.cat([{before}, {code}.reshape(-1)])[3:].view({tuple(tensor.shape)})"
    return code + (".requires_grad_()" if tensor.requires_grad else "")
