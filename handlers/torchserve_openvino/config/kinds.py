"""The causes of a fallback, as the YAML names them and the report counts them."""

from typing import Literal, get_args

FallbackKind = Literal[
    "graph_break",
    "unsupported_op",
    "disabled_op",
    "tiny_partition",
    "conversion_failed",
    "compile_failed",
    "runtime_failed",
    "outside_compiled",
]
FALLBACK_KINDS: tuple[FallbackKind, ...] = get_args(FallbackKind)
