"""Puts torch's own operators and pairs of real numbers back where tracing needed something else.

While torch traces, operators that it would unroll or decompose are custom ones (`ops.opaque_ops`), and complex numbers
are pairs of real ones, with conversions in between that cancel out (`ops.rules.complex_numbers`).
"""

from torch.fx import Graph

from torchserve_openvino.ops.opaque_ops import restore_original_ops
from torchserve_openvino.ops.rules.complex_numbers import join_pairs
from torchserve_openvino.passes.pass_context import PassContext


def restore_operators(graph: Graph, _: PassContext) -> None:
    """Replaces the custom operators with those that they kept whole, in place."""
    restore_original_ops(graph)


def join_complex_pairs(graph: Graph, _: PassContext) -> None:
    """Removes conversions of pairs to complex numbers and back, in place."""
    join_pairs(graph)
