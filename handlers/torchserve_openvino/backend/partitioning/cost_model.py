"""Whether a piece of a graph is worth the way into OpenVINO and back.

A call of a partition costs about 100 microseconds whatever it computes. A graph that falls into pieces may have
pieces whose few light operators eager PyTorch computes in less. The figures are those of
scripts/benchmarks/partitions.py: up to 100 microseconds eager PyTorch won in every case, above it depends on how many
operators OpenVINO fuses. A graph that runs on OpenVINO as a whole crosses once and is handed over whatever its
size, unless the user states a size.
"""

from collections.abc import Sequence

import torch
from torch.fx import Node

from torchserve_openvino.ops import Refusal, does_work, moves_only, op_name
from torchserve_openvino.ops.names import tensors_of, value_of

# What a piece must take in eager PyTorch at least, where the user states nothing.
PIECE_US = 100.0
# Eager PyTorch, one operator: its dispatch, and bytes read and written while they fit the cache.
OP_US = 7.0
BYTES_PER_US = 40_000.0
# What eager PyTorch takes several passes or a library for: a gain there does not show in the size of the tensors.
_LIGHT = frozenset({torch.Tag.pointwise, torch.Tag.reduction})


def eager_us(nodes: Sequence[Node]) -> float | None:
    """Microseconds that eager PyTorch takes for some nodes, estimated; None where an operator is not a light one.

    Args:
        nodes: With static sizes; a symbolic one has no estimate.
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
    """The reason to leave a piece in eager PyTorch, or None.

    Args:
        nodes: Of one proposed partition.
        least_us: What a piece must take in eager PyTorch at least.
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
