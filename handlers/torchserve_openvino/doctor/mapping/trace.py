"""One operator, taken apart by torch on the values it was called with."""

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
    """The ATen graph of a call; its placeholders are the tensors among the arguments, in order.

    Args:
        function: An operator, or what implements it in Python.
        args: Real values, as seen in the model.
        kwargs: The same.
        table: Decompositions.

    Returns:
        None where torch can't trace it.
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
        # Anything may go wrong in somebody's kernel that is run on fake tensors: then there is no graph to offer.
        return None


def work_nodes(graph: GraphModule) -> list[Node]:
    """The operators of a traced graph."""
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def names(graph: GraphModule) -> list[str]:
    """Their names, each once, in order."""
    return list(dict.fromkeys(op_name(node.target) for node in work_nodes(graph)))
