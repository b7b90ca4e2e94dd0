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
    options = {"min_partition_us": 0, **mode.options}
    how = f"dynamic={mode.dynamic}, backend={mode.backend!r}, options={options!r}"
    compiled = f"tov.compile(model, {how})"
    if mode.open:
        axes = f"OpenAxes({program.open_axes}, {mode.open == 'ones'})"
        compiled = f"compile_with(model, CompileSpec({how}, open_axes={axes}))"
    context = {"no_grad": "torch.no_grad()", "inference_mode": "torch.inference_mode()", "grad": "torch.enable_grad()"}
    calls = [f"    ({_call(program, step)}),  # {step}" for step in mode.steps if step != "W"]
    change = "\n# The weights change between the calls where the list of steps has a W." if "W" in mode.steps else ""
    return f"""{comment}
# steps {mode.steps}{change}
import torch
import torch.nn.functional as F
from torch import cond

import torchserve_openvino as tov
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.open_axes import OpenAxes


{program.source()}

def make():
    torch.manual_seed({program.seed})
    return Model().train({mode.train})


def soil():
    for _ in range(8):
        [torch.full((n,), 1e20) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) for _ in range(20)]


eager, model = make(), make()
compiled = {compiled}{".freeze()" if mode.frozen else ""}
calls = [
{chr(10).join(calls)}
]
with {context[mode.grad]}:
    for arguments in calls:
        theirs = [t.clone() if t.is_contiguous() else t.T.clone().T for t in arguments]
        for name, run, given in (("eager", eager, arguments), ("ours ", compiled, theirs)):
            soil()
            try:
                print(name, run(*given))
            except Exception as error:
                print(name, "raises", type(error).__name__, str(error)[:300])
summary = compiled.report.summary
print("coverage", summary.coverage, "fallbacks", summary.fallbacks)
for name, value in eager.named_buffers():
    print(name, "eager", value.tolist(), "ours", dict(model.named_buffers())[name].tolist())
"""


def _call(program: Program, step: str) -> str:
    made = arguments(program, step, False)
    parts = [_literal(spec, tensor) for spec, tensor in zip(program.inputs, made, strict=True)]
    return ", ".join(parts) + ","


def _literal(spec: Input, tensor: torch.Tensor) -> str:
    dtype = (
        "" if tensor.dtype in (torch.float32, torch.int64, torch.bool) and tensor.numel() else f", dtype={tensor.dtype}"
    )
    if tensor.numel() > _MOST_LITERAL:
        code = f"torch.randn({tuple(tensor.shape)}).to({tensor.dtype})"
    else:
        values = repr(
            [round(v, 4) for v in tensor.reshape(-1).tolist()]
            if tensor.is_floating_point()
            else tensor.reshape(-1).tolist()
        )
        values = values.replace("-inf", '-float("inf")').replace(" inf", ' float("inf")')
        code = f"torch.tensor({values}{dtype})"
        if tensor.dim() != 1:
            code += f".reshape({', '.join(map(str, tensor.shape)) or '()'})"
    if spec.layout == "strided" and tensor.dim():
        code += ".repeat_interleave(2, dim=-1)[..., ::2]"
    if spec.layout == "transposed" and tensor.dim() > 1:
        code += ".transpose(-1, -2).contiguous().transpose(-1, -2)"
    return code
