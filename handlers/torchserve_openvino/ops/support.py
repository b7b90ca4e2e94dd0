"""Decides which nodes may run on OpenVINO, and gives the reason for each that may not.

The basis is what the installed OpenVINO supports: its Python table (op_support.py of its torch.compile backend), and
its C++ frontend, which is queried for a conversion rule operator by operator. The rules of `ops.rule_registry` correct
this; tests/unit/ops and scripts/op_conformance.py (over torch's op_db) verify them.
"""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.integers import most
from torchserve_openvino.ops.memory_order import example_of
from torchserve_openvino.ops.names import (
    arguments_of,
    first_input,
    is_empty,
    is_symbolic_scalar,
    op_name,
    packets,
    tensors_of,
    value_of,
)
from torchserve_openvino.ops.rule_registry import NARROW_INTEGERS, ArgumentLimit, rule_of
from torchserve_openvino.ops.symbolic_sizes import depends_on_values, is_always_true, is_undecided_size
from torchserve_openvino.report import FallbackKind

# The dtypes for which OpenVINO's CPU plugin gives the same results as torch. It computes float64 as float32, and the
# frontend's support of the wider unsigned types is incomplete.
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_WIDE_INTS = frozenset({torch.int64, torch.int32, torch.bool})
_RUNS = _FLOATS | _WIDE_INTS | NARROW_INTEGERS

_SYMBOLIC = frozenset(
    {"operator.add", "operator.sub", "operator.mul", "operator.floordiv", "aten.sym_size.int", "operator.getitem"}
)


@dataclass(frozen=True)
class Unsupported:
    """Why a node does not run on OpenVINO."""

    kind: FallbackKind
    reason: str


class SupportTable:
    """The capability check, node by node.

    Args:
        upstream: Names in OpenVINO's own table, without ``torch.ops.``: overloads, or packets for all their overloads.
        disabled: Canonical names that the user disabled (`BackendOptions.disabled_ops`).
        converts: Whether OpenVINO's frontend has a conversion rule for an overload.
        mapped: Whether the user mapped an overload, which wins over everything but ``disabled``.
        own: Whether this package's conversions are used; TorchScript's tracer can't call them.

    Attributes:
        own: As above.
    """

    def __init__(
        self,
        upstream: Iterable[str],
        disabled: Iterable[str] = (),
        *,
        converts: Callable[[str], bool],
        mapped: Callable[[str], bool] = lambda name: False,
        own: bool = True,
    ) -> None:
        self._supported = frozenset(upstream)
        self._disabled = frozenset(disabled)
        self._converts = converts
        self.is_mapped = mapped
        self.own = own

    def knows(self, name: str) -> bool:
        """Returns whether an overload (``aten.relu.default``) has a conversion that is neither banned nor disabled."""
        if self.is_disabled(name):
            return False
        rule = rule_of(name)
        if self.is_mapped(name) or rule.convert is not None:
            return True
        # The rules are for ATen operators; upstream also lists some of quantized_decomposed and torchvision.
        listed = rule.verified or name in self._supported or packet_name(name) in self._supported
        return name.startswith("aten.") and not rule.banned and listed and self._converts(name)

    def is_disabled(self, name: str) -> bool:
        """Returns whether the user disabled this overload, by its own name or by its packet's."""
        return name in self._disabled or packet_name(name) in self._disabled

    def refuse_name(self, name: str) -> Unsupported | None:
        """Returns why an operator is refused whatever its inputs, or None."""
        if self.is_disabled(name):
            return Unsupported("disabled_op", f"{name} is listed in disabled_ops")
        if self.knows(name):
            return None
        if reason := rule_of(name).banned:
            return Unsupported("unsupported_op", reason)
        if not self._converts(name):
            return Unsupported("unsupported_op", f"OpenVINO has no conversion rule for {name}")
        return Unsupported(
            "unsupported_op",
            f"OpenVINO converts {name}, but its results are unverified: op_support.py does not offload it either",
        )

    def refuse(self, node: Node) -> Unsupported | None:
        """Returns why a node is refused, or None if it may run on OpenVINO."""
        try:
            return self._refuse(node)
        except RuntimeError as error:
            if not is_undecided_size(error):
                raise
            return Unsupported("unsupported_op", "a rule depends on a size that is known only when the model runs")

    def _refuse(self, node: Node) -> Unsupported | None:
        name = op_name(node.target)
        if is_symbolic_scalar(node):
            allowed = name in _SYMBOLIC and isinstance(value_of(node), (int, torch.SymInt)) and not _rounds_up(node)
            return None if allowed else Unsupported("unsupported_op", "a scalar that is computed in Python")
        if name == "operator.getitem":
            return None
        if not isinstance(node.target, torch._ops.OpOverload):
            return Unsupported("unsupported_op", f"{name} is not an ATen operator")
        refusal = self._refuse_overload(node, node.target, name) or _refuse_types(node, name)
        if refusal is not None or self.is_mapped(name):
            return refusal
        return self._refuse_arguments(node, name)

    def _refuse_overload(self, node: Node, target: torch._ops.OpOverload, name: str) -> Unsupported | None:
        seeded = torch.Tag.nondeterministic_seeded in target.tags and not self.is_mapped(name)
        draws = rule_of(name).draws
        if seeded and (draws is None or draws(node)):
            return Unsupported("unsupported_op", f"{name} draws random numbers: torch's own generator must decide them")
        if target._schema.is_mutable:
            return Unsupported("unsupported_op", f"{name} writes to its input; OpenVINO graphs are functional")
        refusal = self.refuse_name(name)
        # Training also saves the other outputs.
        others = rule_of(name).first_output_only
        if refusal is None and others and len(_used_outputs(node)) > 1:
            return Unsupported("unsupported_op", f"{others} of {name} is used")
        return refusal

    def _refuse_arguments(self, node: Node, name: str) -> Unsupported | None:
        """Refuses arguments for which the conversion gives different results than torch."""
        outputs, rule = _used_outputs(node), rule_of(name)
        limit = self._limit(name)
        if (
            reason := (limit(node) if limit is not None else None) or _is_long(node) or _may_be_of_nothing(node)
        ) is not None:
            return Unsupported("unsupported_op", reason)
        # These types may be moved and cast, not computed with.
        narrow = any(tensor.dtype in NARROW_INTEGERS for tensor in outputs)
        if narrow and rule.movement is None and not rule.saturates:
            return Unsupported(
                "unsupported_op", f"{name} computes in integers of 8 or 16 bits: torch wraps around, OpenVINO saturates"
            )
        integers = any(tensor.dtype in {torch.int64, torch.int32} for tensor in outputs)
        if integers and rule.multiplies:
            return Unsupported("unsupported_op", f"{name} on integers may exceed 2^24, up to which OpenVINO is exact")
        return None

    def _limit(self, name: str) -> ArgumentLimit | None:
        rule = rule_of(name)
        return rule.limit if self.own else rule.limit_traced or rule.limit


def _rounds_up(node: Node) -> bool:
    """Returns True for a quotient of numbers that may be negative: OpenVINO rounds it towards 0, Python down."""
    if node.target is not operator.floordiv:
        return False
    operands: list[Any] = [value_of(arg) if isinstance(arg, Node) else arg for arg in node.args]
    return not all(is_always_true(operand >= 0) for operand in operands)


def moves_only(name: str) -> bool:
    """Returns whether an operator only moves, compares or casts values, so that several of them may cancel out."""
    return rule_of(name).movement is not None


def _used_outputs(node: Node) -> list[torch.Tensor]:
    """Returns the output tensors of a node that are used (batch norm returns empty statistics in evaluation)."""
    value = value_of(node)
    if not isinstance(value, (list, tuple)):
        return tensors_of(value)
    taken = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    whole = any(user.target is not operator.getitem for user in node.users)
    return [t for i, item in enumerate(value) if whole or i in taken for t in tensors_of(item)]


def _refuse_types(node: Node, name: str) -> Unsupported | None:
    """Refuses dtypes, devices and sizes that OpenVINO rejects, or computes differently whatever the operator."""
    outputs = _used_outputs(node)
    if any(isinstance(value_of(source), (torch.SymFloat, torch.SymBool)) for source in node.all_input_nodes):
        return Unsupported("unsupported_op", f"{name} takes a number that Python computes from sizes")
    inputs = [tensor for source in node.all_input_nodes for tensor in tensors_of(value_of(source))]
    for tensor in (*inputs, *outputs):
        if tensor.device.type != "cpu":
            return Unsupported("unsupported_op", f"{name} has a tensor on {tensor.device}; inputs must be on the CPU")
        if tensor.dtype not in _RUNS:
            return Unsupported("unsupported_op", f"{name} on {tensor.dtype}: OpenVINO does not compute it exactly")
        if is_empty(tensor):
            return Unsupported("unsupported_op", f"{name} has a tensor with a dimension of size 0: nothing to compute")
        if tensor.is_sparse or tensor.is_quantized:
            return Unsupported("unsupported_op", f"{name} has a sparse or quantized tensor")
    return None


# Of nothing, torch's is NaN and OpenVINO's is 0.
_AVERAGES = packets("mean var var_mean std std_mean")


def _may_be_of_nothing(node: Node) -> str | None:
    """Returns why a node stays in eager PyTorch: it averages a number of values that depends on values; or None."""
    source = first_input(node)
    if packet_name(op_name(node.target)) not in _AVERAGES or source is None or not depends_on_values(source.shape):
        return None
    dims = arguments_of(node).get("dim")
    over = [dims] if isinstance(dims, int) else dims or range(source.dim())
    counts = [source.shape[dim] for dim in over]
    return "an average of values whose number may be 0" if depends_on_values(counts) else None


# --- sums over open dimensions --------------------------------------------------------------------------------------

# OpenVINO adds up many values one by one in float32, and loses digits. Dimensions of known length are summed in blocks
# (`passes/ov/long_reductions.py`); those of open length are limited. The error of a sum is 1e-5 at these lengths:
# of other dimensions than the last, and of the last one.
_LONGEST, _LONGEST_LAST = 2**17, 2**22


def _open_count(node: Node) -> tuple[Any, int]:
    """Returns how many floats a node adds up one by one, if that is a symbolic size, and how many it may.

    OpenVINO adds up accurately along the last dimension, alone or with others.
    """
    nothing = 0, _LONGEST
    if node.op != "call_function" or not rule_of(op_name(node.target)).adds:
        return nothing
    source, dims = first_input(node), arguments_of(node).get("dim")
    if source is None or not source.is_floating_point() or not source.dim():
        return nothing
    over = {dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims or range(source.dim()))}
    if op_name(node.target) != "aten.cumsum.default" and source.dim() - 1 in over:
        count = source.shape[-1]
        return (count, _LONGEST_LAST) if not isinstance(count, int) else nothing
    count = math.prod(source.shape[dim] for dim in over)
    return (count, _LONGEST) if not isinstance(count, int) else nothing


def _is_long(node: Node) -> str | None:
    """Returns why a node stays in eager PyTorch: it adds up long dimensions of open length; or None."""
    count, longest = _open_count(node)
    if (example := example_of(count)) <= longest // 2:
        return None
    return f"a sum over an open dimension of {example} values: OpenVINO keeps the digits of {longest}"


def keeps_digits(node: Node, size: int) -> bool:
    """Returns True if a node loses no digits as long as no symbolic size exceeds ``size``."""
    count, longest = _open_count(node)
    return most(count, size, divides=True) <= longest
