"""Words that the YAML, the report and Python share: the causes of a fallback, and the names of the backends."""

from typing import Literal, get_args

# Causes of a fallback, as the YAML names them and the report counts them.
FallbackKind = Literal[
    "graph_break",
    "unsupported_op",
    "disabled_op",
    "tiny_partition",
    "slower",
    "conversion_failed",
    "compile_failed",
    "compile_died",
    "runtime_failed",
    "outside_compiled",
]
FALLBACK_KINDS: tuple[FallbackKind, ...] = get_args(FallbackKind)

# The names of our backends, but for an alias.
COMPILING = ("openvino", "openvino_ts", "export")
# Backends that capture with Dynamo, whose graphs may have symbolic sizes.
BY_DYNAMO = frozenset({"openvino", "openvino_ts"})
OURS = (*COMPILING, "openvino_serving")
# Names that earlier versions had, and what replaces them.
REMOVED = {
    "auto": "the backend auto is gone: `torchserve-openvino tune` tries `export` and writes it into the YAML if it is "
    f"faster; or name one of {', '.join(COMPILING)}.",
}
# Of any number in a configuration, in whatever unit: multiplied by a billion, it is still a number.
MAX_NUMBER = 1e100


def canonical(name: str) -> str:
    """Resolves the alias ``openvino_serving``, the name under which Dynamo lists ``openvino``."""
    return "openvino" if name == "openvino_serving" else name


# In whatever unit: multiplied by a billion, it is still a number.
MAX_NUMBER = 1e100
