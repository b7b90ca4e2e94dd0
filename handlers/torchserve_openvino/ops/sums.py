"""How many values an operator adds up along dimensions of open length.

OpenVINO adds along a dimension in few float32 accumulators, and loses digits where the dimension is long. One of known
length is added up in blocks (`backend.conversion.long_reductions`); one of open length is limited.
"""

from typing import Any

from torch.fx import Node

from torchserve_openvino.ops.integers import most
from torchserve_openvino.ops.memory_order import example_of
from torchserve_openvino.ops.names import arguments_of, first_input, op_name
from torchserve_openvino.ops.registry import rule_of

# The error of a sum is 1e-5 at this length.
LONGEST_OPEN_SUM = 2**17


def open_lengths(node: Node) -> list[Any]:
    """Returns the symbolic sizes of the dimensions along which a node adds up floats; none if it does not."""
    if node.op != "call_function" or not rule_of(op_name(node.target)).adds:
        return []
    source = first_input(node)
    if source is None or not source.is_floating_point():
        return []
    dims = arguments_of(node).get("dim")
    over = [dims] if isinstance(dims, int) else dims or range(source.dim())
    return [source.shape[dim] for dim in over if not isinstance(source.shape[dim], int)] if source.dim() else []


def is_long(node: Node) -> str | None:
    """Returns why a node stays in eager PyTorch: it adds up long dimensions of open length; or None."""
    longest = max(map(example_of, open_lengths(node)), default=0)
    if longest <= LONGEST_OPEN_SUM // 2:
        return None
    return f"a sum over an open dimension, {longest} long: OpenVINO adds up {LONGEST_OPEN_SUM} without loss of digits"


def fits(node: Node, size: int) -> bool:
    """Returns True if a node loses no digits as long as no symbolic size exceeds ``size``."""
    return all(most(length, size) <= LONGEST_OPEN_SUM for length in open_lengths(node))
