"""Estimates whether a piece of a graph is worth the cost of calling OpenVINO.

A call of a partition costs about 100 microseconds, whatever it computes. A graph that is split into pieces may have
some with a few light operators that eager PyTorch computes in less time. The figures are from
scripts/benchmarks/partitions.py: up to 100 microseconds, eager PyTorch was faster in every case; above, it depends on
how many operators OpenVINO fuses. A graph that runs on OpenVINO as a whole needs only one call, and runs there
whatever its size, unless the user sets a minimum.
"""

from collections.abc import Sequence

import torch
from torch.fx import Node

from torchserve_openvino.ops import Refusal, does_work, moves_only, op_name
from torchserve_openvino.ops.names import tensors_of, value_of

# Default minimum time of a piece in eager PyTorch, if the graph is split.
PIECE_US = 100.0
# Eager PyTorch's dispatch of one operator, and the bytes it reads and writes per microsecond while they fit the cache.
OP_US = 7.0
BYTES_PER_US = 40_000.0
# Light operators. Others take eager PyTorch several passes or a library: a gain there does not show in tensor sizes.
_LIGHT = frozenset({torch.Tag.pointwise, torch.Tag.reduction})


def eager_us(nodes: Sequence[Node]) -> float | None:
    """Estimates the microseconds that eager PyTorch takes for some nodes; None if an operator is not light.

    Args:
        nodes: Nodes with static sizes; also None if a size is symbolic.
    """
    total = 0.0
    for node in nodes:
        if not does_work(node):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or not _is_light(node.target):
            return None
        tensors = [t for each in (node, *node.all_input_nodes) for t in tensors_of(value_of(each))]
        if any(not isinstance(size, int) for tensor in tensors for size in tensor.shape):
            return None
        total += OP_US + sum(tensor.numel() * tensor.element_size() for tensor in tensors) / BYTES_PER_US
    return total


def _is_light(target: torch._ops.OpOverload) -> bool:
    return bool(_LIGHT.intersection(target.tags)) or moves_only(op_name(target))


def refuse_tiny(nodes: Sequence[Node], least_us: float) -> Refusal | None:
    """Returns the reason to leave a piece in eager PyTorch, or None.

    Args:
        nodes: The nodes of one proposed partition.
        least_us: Minimum time of a piece in eager PyTorch, in microseconds.
    """
    estimate = eager_us(nodes)
    if estimate is None or estimate >= least_us:
        return None
    ops = sum(does_work(node) for node in nodes)
    return Refusal(
        "tiny_partition",
        f"a piece of {ops} light operator(s), about {estimate:.0f} us in eager PyTorch: less than it costs to call "
        f"OpenVINO (min_partition_us: {least_us:g})",
    )
