"""Writes Python statements that build a traced ATen graph from OpenVINO operations."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.spec import OV_TYPES
from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops import op_name
from torchserve_openvino.ops.rule_registry import rule_of

# torch's names; after a colon OpenVINO's name, where it differs.
UNARY = {
    item.partition(":")[0]: item.partition(":")[2] or item
    for item in """
    abs acos acosh asin asinh atan atanh ceil:ceiling cos cosh erf exp floor log logical_not neg:negative relu sigmoid
    sign sin sinh sqrt tan tanh mish silu:swish hardswish:hswish isnan:is_nan isinf:is_inf isfinite:is_finite
    """.split()
}
BINARY = {
    item.partition(":")[0]: item.partition(":")[2] or item
    for item in """
    add sub:subtract mul:multiply div:divide pow:power maximum minimum eq:equal ne:not_equal
    lt:less le:less_equal gt:greater ge:greater_equal logical_and logical_or
    logical_xor
    """.split()
}
_BITWISE = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor"}
_REDUCE = {"sum": "reduce_sum", "mean": "reduce_mean", "amax": "reduce_max", "amin": "reduce_min"}
_SAME = frozenset({"clone", "detach", "alias", "lift_fresh_copy"})
_TYPE_NAMES = {dtype: str(kind.get_type_name()) for dtype, kind in OV_TYPES.items()}


class UnknownOpError(Exception):
    """A node that has no translation here."""


class MappingWriter:
    """Translates a traced graph to Python statements.

    Args:
        graph: Its placeholders are the tensors among the arguments.
        bound: Arguments by the schema's names.
        floats: The unique value traced for each floating-point argument, to the name of its parameter.
        named: The schema's argument names, to the parameters of the mapping.
    """

    def __init__(
        self, graph: GraphModule, bound: Mapping[str, Any], floats: Mapping[float, str], named: Mapping[str, str]
    ) -> None:
        self._graph = graph
        self._floats = floats
        self._names: dict[Node, str] = {}
        self._tensors = [
            f"{named[name]}[{i}]" if isinstance(value, (list, tuple)) else named[name]
            for name, value in bound.items()
            for i, leaf in enumerate(pytree.tree_leaves(value))
            if isinstance(leaf, torch.Tensor)
        ]

    def lines(self) -> list[str]:
        """Returns the statements; the last one is a return.

        Raises:
            UnknownOpError: A node has no translation here.
        """
        placeholders = self._graph.graph.find_nodes(op="placeholder")
        self._names.update(zip(placeholders, self._tensors, strict=True))
        written: list[str] = []
        for node in work_nodes(self._graph):
            text = self._expression(node)
            name = f"v{len(written) + 1}"
            written.append(f"{name} = {text}")
            self._names[node] = name
        (output,) = self._graph.graph.find_nodes(op="output")
        value = output.args[0]
        if isinstance(value, (list, tuple)):
            return [*written, f"return {', '.join(self._value(item) for item in value)}"]
        if not isinstance(value, Node):
            raise UnknownOpError
        return [*written, f"return {self._names[value]}"]

    def _value(self, value: Any) -> str:
        if not isinstance(value, Node) or value not in self._names:
            raise UnknownOpError
        return self._names[value]

    def _operand(self, value: Any, like: Any) -> str:
        """Returns a tensor's name, or a constant of the other operand's type."""
        if isinstance(value, Node):
            return self._value(value)
        return f"constant({self._literal(value)}, {self._value(like)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, float):
            if value in self._floats:
                return self._floats[value]
            if -value in self._floats:
                return f"-{self._floats[-value]}"
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise UnknownOpError
        return repr(value)

    def _expression(self, node: Node) -> str:
        name = op_name(node.target)
        if rule_of(name).banned:
            # The operator is banned because OpenVINO's operation of this name gives other answers.
            raise UnknownOpError
        packet = packet_name(name).split(".")[1]
        args, kwargs = node.args, node.kwargs
        if packet in _SAME:
            return self._value(args[0])
        if packet in UNARY and len(args) == 1:
            return f"ops.{UNARY[packet]}({self._value(args[0])})"
        if packet in _BITWISE and node.meta["val"].dtype is torch.bool:
            packet = _BITWISE[packet]
        if packet in BINARY and not kwargs:
            return self._binary(packet, args)
        if packet == "hypot":
            first, second = self._value(args[0]), self._value(args[1])
            return self._hypot(first, second)
        if packet in _REDUCE:
            return self._reduction(packet, args)
        if packet == "where" and len(args) == 3:
            like = next((arg for arg in args[1:] if isinstance(arg, Node)), None)
            values = ", ".join(self._operand(arg, like) for arg in args[1:])
            return f"ops.select({self._value(args[0])}, {values})"
        if packet in {"mm", "bmm", "matmul"}:
            return f"ops.matmul({self._value(args[0])}, {self._value(args[1])}, False, False)"
        return self._other(packet, node)

    def _binary(self, packet: str, args: Sequence[Any]) -> str:
        first, second = args[0], args[1]
        like = first if isinstance(first, Node) else second
        types = {str(node.meta["val"].dtype) for node in (first, second) if isinstance(node, Node)}
        # OpenVINO does not promote types: operators with implicit casts are left to the user.
        if len(types) != 1 or (packet == "div" and not like.meta["val"].is_floating_point()):
            raise UnknownOpError
        if isinstance(second, float) and not like.meta["val"].is_floating_point():
            raise UnknownOpError
        return f"ops.{BINARY[packet]}({self._operand(first, like)}, {self._operand(second, like)})"

    def _reduction(self, packet: str, args: Sequence[Any]) -> str:
        dims = args[1] if len(args) > 1 and args[1] else list(range(args[0].meta["val"].dim()))
        keep = bool(args[2]) if len(args) > 2 else False
        return f"ops.{_REDUCE[packet]}({self._value(args[0])}, {list(dims)!r}, {keep})"

    def _other(self, packet: str, node: Node) -> str:
        args = node.args
        x = self._value(args[0]) if args and isinstance(args[0], Node) else ""
        one = f"constant(1.0, {x})"
        simple = {
            "log1p": f"ops.log(ops.add({x}, {one}))",
            "rsqrt": f"ops.divide({one}, ops.sqrt({x}))",
            "reciprocal": f"ops.divide({one}, {x})",
            "square": f"ops.multiply({x}, {x})",
            "erfc": f"ops.subtract({one}, ops.erf({x}))",
        }
        if packet in simple and len(args) == 1 and args[0].meta["val"].is_floating_point():  # type: ignore[union-attr]
            return simple[packet]
        if packet in {"permute", "transpose", "t"}:
            return f"ops.transpose({x}, {_order(packet, node)!r})"
        if packet in {"unsqueeze", "squeeze"} and len(args) == 2:
            axes = [args[1]] if isinstance(args[1], int) else list(args[1])  # type: ignore[arg-type]
            return f"ops.{packet}({x}, {axes!r})"
        if packet in {"_softmax", "softmax"}:
            return f"ops.softmax({x}, {args[1]!r})"
        if packet == "_to_copy" and node.meta["val"].dtype in _TYPE_NAMES:
            return f'ops.convert({x}, "{_TYPE_NAMES[node.meta["val"].dtype]}")'
        if packet == "cat":
            dim = args[1] if len(args) > 1 else 0
            parts = ", ".join(self._value(arg) for arg in args[0])  # type: ignore[union-attr]
            return f"ops.concat([{parts}], {dim!r})"
        if packet == "clamp":
            return self._clamp(x, args)
        raise UnknownOpError

    def _hypot(self, x: str, y: str) -> str:
        """Returns an expression that does not square large numbers."""
        sizes = f"ops.abs({x}), ops.abs({y})"
        most, tiny = f"ops.maximum({sizes})", f"constant({torch.finfo(torch.float32).tiny}, {x})"
        ratio = f"ops.divide(ops.minimum({sizes}), ops.maximum({most}, {tiny}))"
        root = f"ops.sqrt(ops.add(constant(1.0, {x}), ops.power({ratio}, constant(2.0, {x}))))"
        return f"ops.multiply({most}, {root})"

    def _clamp(self, x: str, args: Sequence[Any]) -> str:
        low, high = (*args[1:], None, None)[:2]
        text = x
        if low is not None:
            text = f"ops.maximum({text}, constant({self._literal(low)}, {x}))"
        if high is not None:
            text = f"ops.minimum({text}, constant({self._literal(high)}, {x}))"
        return text


def _order(packet: str, node: Node) -> list[int]:
    rank = node.meta["val"].dim()
    dims: Any = node.args[1:]
    if packet == "permute":
        return [int(dim) % rank for dim in dims[0]]
    order = list(range(rank))
    first, second = (0, rank - 1) if packet == "t" else (int(dims[0]) % rank, int(dims[1]) % rank)
    order[first], order[second] = order[second], order[first]
    return order


# --- traces one operator into its decomposition, with the values that it was called with --------------------------


def trace_op(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], table: Mapping[Any, Any]
) -> GraphModule | None:
    """Returns the ATen graph of a call; its placeholders are the tensors among the arguments, in order.

    Args:
        function: An operator, or its Python implementation.
        args: Real values, as seen in the model.
        kwargs: The same.
        table: Decompositions to apply.

    Returns:
        The graph; None where torch can't trace the call.
    """
    flat, structure = pytree.tree_flatten((args, dict(kwargs)))
    positions = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for position, tensor in zip(positions, tensors, strict=True):
            values[position] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(values, structure)
        return function(*call_args, **call_kwargs)

    # Values that were recorded in inference mode cannot be traced outside of it.
    tensors = [flat[i].clone() if flat[i].is_inference() else flat[i] for i in positions]
    try:
        with torch.no_grad():
            return make_fx(call, decomposition_table=dict(table), tracing_mode="fake")(*tensors)
    except Exception:
        # A custom kernel may raise anything when it runs on fake tensors; then there is no graph.
        return None


def work_nodes(graph: GraphModule) -> list[Node]:
    """Returns the operator nodes of a traced graph."""
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def names(graph: GraphModule) -> list[str]:
    """Returns the distinct operator names of a traced graph, in order."""
    return list(dict.fromkeys(op_name(node.target) for node in work_nodes(graph)))
