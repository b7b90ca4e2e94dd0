"""How many values an operator adds up along dimensions of open length.

OpenVINO adds up many values one by one in float32, and loses digits. Dimensions of known length are added up in blocks
(`backend.conversion.long_reductions`); those of open length are limited.
"""

import math
from typing import Any

from torch.fx import Node

from torchserve_openvino.ops.integers import most
from torchserve_openvino.ops.memory_order import example_of
from torchserve_openvino.ops.names import arguments_of, first_input, op_name
from torchserve_openvino.ops.registry import rule_of

# The error of a sum is 1e-5 at these lengths: of other dimensions than the last, and of the last one.
_LONGEST, _LONGEST_LAST = 2**17, 2**22


def _open_count(node: Node) -> tuple[Any, int]:
    """Returns how many floats a node adds up one by one, if that is a symbolic size, and how many it may.

    OpenVINO adds up accurately along the last dimension, alone or with others.
    """
    nothing = 0, _LONGEST
    if node.op != "call_function" or not rule_of(op_name(node.target)).adds:
        return nothing
    source, dims = first_input(node), arguments_of(node).get("dim")
    if source is None or not source.is_floating_point() or not source.dim():
        return nothing
    over = {dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims or range(source.dim()))}
    if op_name(node.target) != "aten.cumsum.default" and source.dim() - 1 in over:
        count = source.shape[-1]
        return (count, _LONGEST_LAST) if not isinstance(count, int) else nothing
    count = math.prod(source.shape[dim] for dim in over)
    return (count, _LONGEST) if not isinstance(count, int) else nothing


def is_long(node: Node) -> str | None:
    """Returns why a node stays in eager PyTorch: it adds up long dimensions of open length; or None."""
    count, longest = _open_count(node)
    if (example := example_of(count)) <= longest // 2:
        return None
    return f"a sum over an open dimension of {example} values: OpenVINO keeps the digits of {longest}"


def fits(node: Node, size: int) -> bool:
    """Returns True if a node loses no digits as long as no symbolic size exceeds ``size``."""
    count, longest = _open_count(node)
    return most(count, size, divides=True) <= longest
