"""What a call did: its outputs, effects on inputs and module state, gradients, and aliasing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass
class Observation:
    """Observation of one call.

    Attributes:
        error: Class and message of the exception; empty if there was none.
        structure: Structure of the answer as text, with all values that are not tensors.
        tensors: Copies of values by name: ``output 0``, ``input x0``, ``state b0``, ``grad x0``.
        strides: Strides of outputs.
        aliases: Maps an output and another name to ``same`` (one object) or ``alias`` (shared memory).
        requires_grad: Flags of outputs and inputs.
        written_with_grad: Whether a value that requires a gradient was written into an input.
    """

    error: str = ""
    structure: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    written_with_grad: bool = False


def observe(
    answer: Any, module: torch.nn.Module, names: list[str], inputs: list[torch.Tensor], backward: bool
) -> Observation:
    """Records what a call did.

    Args:
        answer: Answer of the call.
        module: The module whose state is recorded.
        names: Names of the inputs.
        inputs: Inputs after the call.
        backward: Whether to compute gradients of a weighted sum of all outputs that require them.

    Raises:
        RuntimeError: Torch refuses the backward pass.
    """
    leaves, spec = pytree.tree_flatten(answer)
    outputs = {f"output {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    others = [repr(leaf) if not isinstance(leaf, torch.Tensor) else "tensor" for leaf in leaves]
    seen = Observation(structure=f"{spec} {others}")
    state = {name: value for name, value in _state(module).items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in _state(module).items() if not isinstance(value, torch.Tensor)}
    seen.structure += f" {plain}"
    around = {f"input {name}": t for name, t in zip(names, inputs, strict=True)}
    around |= {f"state {name}": t for name, t in state.items()}
    known = dict(around)
    for name, tensor in outputs.items():
        for other, candidate in known.items():
            if relation := _relation(tensor, candidate):
                seen.aliases[name, other] = relation
        known[name] = tensor
        seen.strides[name] = tuple(tensor.stride())
        seen.requires_grad[name] = tensor.requires_grad
    for name, tensor in zip(names, inputs, strict=True):
        seen.requires_grad[f"input {name}"] = tensor.requires_grad
        seen.written_with_grad |= tensor.requires_grad and not tensor.is_leaf
    for name, tensor in (outputs | around).items():
        seen.tensors[name] = tensor.detach().clone()
    if backward:
        _backward(outputs)
        for name, tensor in zip(names, inputs, strict=True):
            if tensor.is_leaf and tensor.grad is not None:
                seen.tensors[f"grad {name}"] = tensor.grad.detach().clone()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                seen.tensors[f"grad {name}"] = parameter.grad.detach().clone()
                parameter.grad = None
    return seen


def _state(module: torch.nn.Module) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(module.named_parameters()) | dict(module.named_buffers())
    kept = {name: value for name, value in vars(module).items() if name[0] == "a" and name[1:].isdigit()}
    return tensors | kept


def _backward(outputs: dict[str, torch.Tensor]) -> None:
    total: torch.Tensor | None = None
    for position, tensor in enumerate(outputs.values()):
        if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
            weights = torch.linspace(0.5, 1.5, tensor.numel()).reshape(tensor.shape)
            part = (tensor.float() * weights).sum() * (position + 1)
            total = part if total is None else total + part
    if total is not None:
        total.backward()


def _relation(a: torch.Tensor, b: torch.Tensor) -> str:
    if a is b:
        return "same"
    if not a.numel() or not b.numel():
        return ""
    return "alias" if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() else ""
