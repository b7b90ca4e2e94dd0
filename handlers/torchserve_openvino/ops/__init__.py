"""Operators: their names, the capability check with a reason for each refusal, and their decompositions."""

from torchserve_openvino.ops import rules as rules  # importing it declares the rules
from torchserve_openvino.ops.decompositions import decomposition_table, is_composite, overloads
from torchserve_openvino.ops.names import does_work, op_name, where_of
from torchserve_openvino.ops.support import SupportTable, Unsupported, moves_only

__all__ = [
    "SupportTable",
    "Unsupported",
    "decomposition_table",
    "does_work",
    "is_composite",
    "moves_only",
    "op_name",
    "overloads",
    "where_of",
]
