"""Strides that torch promises: those of its own meta functions, which every compiled model lays its answers out by.

A few of torch's CPU kernels answer in another order of dimensions than their meta function says (batch_norm,
logsigmoid, an index with permuted strides): what a compiler that trusts torch answers then differs from eager.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from fuzzing.program import Program
from fuzzing.values import arguments


def promised_strides(module: torch.nn.Module, program: Program, letter: str) -> dict[str, tuple[int, ...]]:
    """Strides of each output of one call, by its name; nothing where torch can't tell without values."""
    with_grad = program.mode.grad == "grad"
    given = arguments(program, letter, with_grad)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(with_grad):
            known: dict[int, torch.Tensor] = {}
            fakes = [known.setdefault(id(tensor), mode.from_tensor(tensor)) for tensor in given]
            leaves = pytree.tree_leaves(module(*fakes))
    except Exception:
        # Whatever a program asks of values that are not there.
        return {}
    return {f"output {i}": tuple(leaf.stride()) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
