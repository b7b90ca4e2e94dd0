"""Reductions over symbolic sizes that drop dimensions.

OpenVINO's CPU plugin merges such a reduction with the transpose or reshape after it, and returns the shape from before
that operator (tests/contract pins it).
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import arguments_of, value_of
from torchserve_openvino.passes.fx.nodes import add_call, replace
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten


def keep_reduced_dimensions(graph: Graph, _: PassContext) -> None:
    """Makes reductions keep their dimensions, and removes these with a squeeze."""
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _keep_reduced_dimensions(node)


def _keep_reduced_dimensions(node: Node) -> None:
    op: Any = node.target
    schema, arguments, value = op._schema.arguments, arguments_of(node), value_of(node)
    dims = arguments.get("dim")
    plain = isinstance(value, torch.Tensor) and any(argument.name == "keepdim" for argument in schema)
    if not plain or arguments.get("keepdim") or dims is None or dims == [] or not node.all_input_nodes:
        return
    source = value_of(node.all_input_nodes[0])
    if all(isinstance(size, int) for size in source.shape):
        return
    reduced = sorted(dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims))
    arguments["keepdim"] = True
    leading = [argument for argument in schema if not argument.kwarg_only]
    leading = leading[: max(i for i, argument in enumerate(leading) if argument.name in arguments) + 1]
    positional = tuple(arguments.get(argument.name, argument.default_value) for argument in leading)
    named = {
        argument.name: arguments[argument.name]
        for argument in schema
        if argument.kwarg_only and argument.name in arguments
    }
    with node.graph.inserting_before(node):
        reduction = add_call(node.graph, op, *positional, **named)
        reduction.meta = {**node.meta, "val": value_of(reduction)}
        replace(node, node.graph.call_function(aten.squeeze.dims, (reduction, reduced)))
