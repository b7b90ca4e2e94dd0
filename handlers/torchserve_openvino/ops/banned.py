"""Corrections to OpenVINO's support table, each with its reason: found by running torch's op_db against eager."""

from collections.abc import Callable
from typing import Any

from torch.fx import Node

ADDED: frozenset[str] = frozenset(
    {
        "aten.celu.default",
        "aten.linear.default",
        "aten.mish.default",
        "aten.pixel_shuffle.default",
        "aten.rad2deg.default",
    }
)

BANNED: dict[str, str] = {
    "aten.kthvalue.default": "OpenVINO converts kthvalue to other values than torch",
}


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _integers(node: Node) -> str | None:
    value = node.all_input_nodes[0].meta.get("val")
    if value is not None and not value.is_floating_point():
        return "computed in integers by OpenVINO where torch goes through floats"
    return None


def _average_pool(node: Node) -> str | None:
    if _argument(node, 4, "ceil_mode", False):
        return "average pooling with ceil_mode: OpenVINO divides the last window by another count than torch"
    return _integers(node)


def _scalar_to_scalar(node: Node) -> str | None:
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if value is not None and source is not None and value.dim() == 0 and source.dim() == 0:
        return "a scalar expanded to a scalar: OpenVINO 2026.4 crashes on it"
    return None


# Operators that convert rightly but for some arguments; each rule returns the reason against a node, or None.
ARGUMENT_RULES: dict[str, Callable[[Node], str | None]] = {
    "aten.avg_pool1d.default": _average_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.avg_pool3d.default": _average_pool,
    "aten.logsumexp.default": _integers,
    "aten.expand.default": _scalar_to_scalar,
}
