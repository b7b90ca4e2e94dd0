"""Operators that move data and compute nothing: packet names (`aten.view`), for the questions that hang on it."""

from typing import Any

import torch

from torchserve_openvino.ops.names import packets

# An output's values are values of the inputs, all or some of them, in another order, shape or type.
HANDS_ON = packets("""
    _to_copy _unsafe_view alias as_strided cat chunk clone contiguous detach expand expand_copy flatten flip
    lift_fresh_copy narrow permute permute_copy repeat reshape roll select slice split split_with_sizes squeeze
    squeeze_copy stack t transpose unbind unfold unsqueeze unsqueeze_copy view view_copy
""")
# An output's values are those of one input, chosen by another.
LOOKS_UP = packets("embedding gather index index_select")
# An output's values are stated, or those of an input that is not the first.
FILLS = packets("copy full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like")
COMPARES = packets("eq ne lt le gt ge")

# Not counted outside a graph: what moves data without computing, and how Python reads a value.
_NO_WORK = HANDS_ON | packets(
    "_has_same_storage_numel _local_scalar_dense copy_ empty empty_like empty_strided is_nonzero item resize_ set_"
)


def computes(op: Any) -> bool:
    """Whether an operator does work, and counts. One of higher order (torch.cond) does not: what runs inside does."""
    return isinstance(op, torch._ops.OpOverload) and not op.is_view and str(op.overloadpacket) not in _NO_WORK
