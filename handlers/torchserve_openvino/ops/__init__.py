"""Operators: their names, who may run on OpenVINO and why not, and what is decomposed first."""

from torchserve_openvino.ops import rules as rules  # declares what is known of each operator
from torchserve_openvino.ops.decompositions import decomposition_table, is_composite, overloads
from torchserve_openvino.ops.names import does_work, op_name, where_of
from torchserve_openvino.ops.support import Refusal, SupportTable, moves_only

__all__ = [
    "Refusal",
    "SupportTable",
    "decomposition_table",
    "does_work",
    "is_composite",
    "moves_only",
    "op_name",
    "overloads",
    "where_of",
]
