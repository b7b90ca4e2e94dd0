"""Calls of a model whose inputs are not declared: how many rows they have, and the same in other batch sizes."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.probe import RowFacts, probe_rows


def rows_of(inputs: Inputs) -> int:
    """Returns the size of the first axis of all inputs; 0 if they are not all tensors with the same one."""
    leaves = pytree.tree_leaves((tuple(inputs[0]), inputs[1]))
    sizes = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0 for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def items_of(inputs: Inputs) -> Any:
    """Returns what distinguishes calls besides their rows: structure, shapes of one row, and dtypes; hashable."""
    leaves, spec = pytree.tree_flatten((tuple(inputs[0]), inputs[1]))
    return repr(spec), tuple(
        (leaf.shape[1:], leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
    )


def resized(inputs: Inputs, rows: int) -> Inputs:
    """Returns inputs with another number of rows: the first ones, over and over."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % tensor.shape[0]]

    with torch.inference_mode(False):
        args, kwargs = pytree.tree_map_only(torch.Tensor, of, (tuple(inputs[0]), inputs[1]))
    return args, kwargs


def probe_first_rows(eager: Callable[..., Any], inputs: Inputs) -> RowFacts:
    """Probes eager PyTorch with the first row of a call, and with other values like it."""
    first = pytree.tree_map(lambda t: t[:1], (tuple(inputs[0]), inputs[1]))
    return probe_rows(eager, first, pytree.tree_map(_like, first))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values in another order, floats also scaled, each by another factor, so that sums differ too.

    Zeros and infinities, of which masks consist, stay what they are, and so do ids.
    """
    turned = tensor.flip(tuple(range(1, tensor.dim())))
    if not turned.is_floating_point():
        return turned
    return turned * torch.linspace(1.0, 1.5, turned.numel()).reshape(turned.shape).to(turned.dtype)
