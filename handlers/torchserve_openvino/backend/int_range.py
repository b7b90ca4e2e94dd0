"""How large an int64 input may be so that 32 bits are enough inside a partition.

OpenVINO's CPU and GPU plugins compute int64 as int32 and wrap around silently. A partition therefore gets a limit for
its int64 inputs: the largest of `LIMITS` for which interval arithmetic over its nodes stays within 32 bits. Each call
checks its inputs against it; beyond, the call runs in eager, counted. Multiplying operators that no limit can hold
(power, product, shift, matrix product of int64) never reach OpenVINO; `ops.support` refuses them.
"""

import math

import torch
from torch.fx import GraphModule, Node

from torchserve_openvino.errors import IntegerRangeError
from torchserve_openvino.ops.names import op_name, packet_name, tensors_of, value_of

INT32_MAX = 2**31 - 1
LIMITS = (INT32_MAX, 2**30, 2**28, 2**24, 2**20, 2**16, 2**14, 2**12, 2**10, 2**8)
# A float that is cast to an integer is taken to be exact in float32; a symbolic size is taken to be below this too.
_ASSUMED = 2**24

_SUMS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
_REDUCTIONS = frozenset({"aten.sum", "aten.cumsum"})
_POSITIONS = frozenset(
    {"aten.argmax", "aten.argmin", "aten.argsort", "aten.nonzero", "aten.sort", "aten.topk", "aten.sym_size"}
)


def input_limit(graph: GraphModule, constants: dict[str, torch.Tensor]) -> int:
    """The largest absolute value that the int64 inputs of a subgraph may have.

    Args:
        graph: The subgraph.
        constants: Placeholder name to the tensor that is frozen there.

    Raises:
        IntegerRangeError: No limit keeps its integers within 32 bits, or a constant exceeds them.
    """
    fixed = {name: _largest(tensor) for name, tensor in constants.items() if tensor.dtype is torch.int64}
    for name, value in fixed.items():
        if value > INT32_MAX:
            raise IntegerRangeError(f"int64 constant {name} holds {value}: OpenVINO computes int64 in 32 bits")
    for limit in LIMITS:
        if _peak(graph, fixed, limit) <= INT32_MAX:
            return limit
    raise IntegerRangeError("int64 arithmetic may exceed 32 bits, in which OpenVINO computes it")


def _largest(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    values = tensor.detach().numpy()
    return max(int(values.max()), -int(values.min()))


def _peak(graph: GraphModule, fixed: dict[str, int], limit: int) -> int:
    """The largest absolute value of an int64 node, for inputs up to ``limit``."""
    bounds: dict[Node, int] = {}
    peak = 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            bounds[node] = fixed.get(node.name, limit)
        elif node.op == "call_function":
            bounds[node] = _bound(node, bounds)
        else:
            continue
        if _is_int64(node):
            peak = max(peak, bounds[node])
    return peak


def _is_int64(node: Node) -> bool:
    return any(tensor.dtype is torch.int64 for tensor in tensors_of(value_of(node)))


def _bound(node: Node, bounds: dict[Node, int]) -> int:
    if not _is_int64(node):
        # Of a bool 1; of a float what a cast to an integer is taken to give; an int32 wraps as torch's does.
        dtypes = {tensor.dtype for tensor in tensors_of(value_of(node))}
        return 1 if dtypes == {torch.bool} else _ASSUMED
    name = packet_name(op_name(node.target))
    values = [_value(arg, bounds) for arg in node.args] or [0]
    if name in _SUMS:
        alpha = node.kwargs.get("alpha", 1)
        return values[0] + values[1] * abs(int(alpha if isinstance(alpha, (int, float)) else 1))
    if name == "aten.mul":
        return values[0] * values[1]
    if name in _REDUCTIONS:
        (source,) = tensors_of(value_of(node.all_input_nodes[0]))
        sizes = [size if isinstance(size, int) else 2**16 for size in source.shape]
        return values[0] * max(1, math.prod(sizes))
    if name in _POSITIONS:
        return _ASSUMED
    if name == "aten.arange":
        return max(values)
    # Everything else selects, moves, compares or shrinks: no result exceeds the inputs.
    return max(bounds.get(source, _ASSUMED) for source in node.all_input_nodes) if node.all_input_nodes else max(values)


def _value(arg: object, bounds: dict[Node, int]) -> int:
    if isinstance(arg, Node):
        return bounds.get(arg, _ASSUMED)
    if isinstance(arg, (int, float)) and not isinstance(arg, bool) and math.isfinite(arg):
        return abs(int(arg))
    return 0
