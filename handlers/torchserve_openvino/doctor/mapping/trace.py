"""Traces one operator into its decomposition, with the values that it was called with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchserve_openvino.ops import op_name


def trace_op(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], table: Mapping[Any, Any]
) -> GraphModule | None:
    """Returns the ATen graph of a call; its placeholders are the tensors among the arguments, in order.

    Args:
        function: An operator, or its Python implementation.
        args: Real values, as seen in the model.
        kwargs: The same.
        table: Decompositions to apply.

    Returns:
        The graph; None where torch can't trace the call.
    """
    flat, structure = pytree.tree_flatten((args, dict(kwargs)))
    positions = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for position, tensor in zip(positions, tensors, strict=True):
            values[position] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(values, structure)
        return function(*call_args, **call_kwargs)

    # Values that were recorded in inference mode cannot be traced outside of it.
    tensors = [flat[i].clone() if flat[i].is_inference() else flat[i] for i in positions]
    try:
        with torch.no_grad():
            return make_fx(call, decomposition_table=dict(table), tracing_mode="fake")(*tensors)
    except Exception:
        # A custom kernel may raise anything when it runs on fake tensors; then there is no graph.
        return None


def work_nodes(graph: GraphModule) -> list[Node]:
    """Returns the operator nodes of a traced graph."""
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def names(graph: GraphModule) -> list[str]:
    """Returns the distinct operator names of a traced graph, in order."""
    return list(dict.fromkeys(op_name(node.target) for node in work_nodes(graph)))
