"""The names of this package's backends, for the YAML and for Python."""

# The backends that `auto` tries; this order decides between equal results.
COMPILING = ("openvino", "openvino_ts", "export")
# Backends that capture with Dynamo, whose graphs may have symbolic sizes.
BY_DYNAMO = frozenset({"openvino", "openvino_ts"})
OURS = (*COMPILING, "auto", "openvino_serving")


def canonical(name: str) -> str:
    """Resolves the alias ``openvino_serving``, the name under which Dynamo lists ``openvino``."""
    return "openvino" if name == "openvino_serving" else name
