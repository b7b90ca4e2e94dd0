"""The names of this package's backends, for the YAML and for Python."""

# What `auto` tries, in this order among equals.
COMPILING = ("openvino", "openvino_ts", "export")
# Captured by Dynamo, which can leave sizes open.
BY_DYNAMO = frozenset({"openvino", "openvino_ts"})
OURS = (*COMPILING, "auto", "openvino_serving")


def canonical(name: str) -> str:
    """One of our names without its synonym: ``openvino_serving`` is how Dynamo knows ``openvino``."""
    return "openvino" if name == "openvino_serving" else name
