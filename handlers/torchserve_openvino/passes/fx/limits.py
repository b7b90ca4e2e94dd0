"""Limits integer inputs of a partition: to what OpenVINO computes exactly, and, for indices, to the size they index.

OpenVINO computes int64 in 32 bits, and most integer operators in float32 (`int_range.py`); an index out of range gives
zeros, where torch raises (`index_range.py`).
"""

from torch import Tensor
from torch.fx import Graph

from torchserve_openvino.ops.value_range import ValueRanges
from torchserve_openvino.passes.fx.index_range import index_bounds
from torchserve_openvino.passes.fx.int_range import input_limits
from torchserve_openvino.passes.pass_context import Bounds, IntegerLimits, PassContext


def limit_inputs(graph: Graph, context: PassContext) -> None:
    """Sets `PassContext.limits`; the graph stays as it is.

    Raises:
        InexactValueError: No limit keeps the integers exact. The message names the operator.
    """
    placeholders = graph.find_nodes(op="placeholder")
    attributes = {node.name: context.tensors[str(node.target)] for node in graph.find_nodes(op="get_attr")}
    tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    tensors |= {placeholders[position].name: tensor for position, tensor in context.constants.items()}
    indices = index_bounds(graph)
    context.limits = [
        IntegerLimits(
            size,
            indices | values | {name: _both(values[name], indices[name]) for name in values.keys() & indices.keys()},
        )
        for size, values in input_limits(graph, tensors, indices)
    ]


def _both(limit: Bounds, index: Bounds) -> Bounds:
    narrow = limit.low > index.low or limit.high < index.high
    return Bounds(max(limit.low, index.low), min(limit.high, index.high), limit.op if narrow else "", *index[3:])


def derive_ranges(graph: Graph, context: PassContext) -> None:
    """Sets `PassContext.ranges` from the limits of inputs and the values of constants; the graph stays as it is."""
    values = {node.name: context.tensors[str(node.target)] for node in graph.find_nodes(op="get_attr")}
    limited = set[str].intersection(*(set(limit.values) for limit in context.limits))
    bounds = {name: [limit.values[name] for limit in context.limits] for name in limited}
    widest = {name: (min(b.low for b in bound), max(b.high for b in bound)) for name, bound in bounds.items()}
    context.ranges = ValueRanges(graph, widest, values)
