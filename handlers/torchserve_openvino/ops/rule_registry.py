"""The rule registry: what this package knows of each operator, one rule per overload or per packet (all its overloads).

`ops.rules` declares the rules, by operator family. The capability check (`ops.support`), the decomposition table
(`ops.decompositions`), the converters, and the analyses of integers and indices in a graph read them. A rule states
only what is special; an operator without a rule is converted by OpenVINO if OpenVINO's own table lists it.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.fx import Node

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.names import packets

if TYPE_CHECKING:
    from torchserve_openvino.ops.integers import IntegerBound
    from torchserve_openvino.ops.value_range import RangeRule

# Reasons not to use OpenVINO's own conversion that several operators share.
FAILS = "its conversion in OpenVINO fails"
SHAPE = "the shape of its result depends on the values of its input"
INSTEAD = "; a decomposition computes it instead"

# Their arithmetic wraps around in torch, and saturates in OpenVINO.
NARROW_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16})
# Returns NotImplemented for arguments that it does not handle.
Decomposition = Callable[..., Any]
# Returns why a node must not run on OpenVINO, or None.
ArgumentLimit = Callable[[Node], str | None]
_F = TypeVar("_F", bound=Callable[..., Any])


class Movement(Enum):
    """Where the results of an operator without arithmetic come from; such operators are exact in every dtype."""

    REARRANGES = "some or all values of its inputs, in another order, shape or type"
    LOOKS_UP = "values of one input, chosen by another"
    FILLS = "a given value, or values of an input other than the first"
    COMPARES = "truth values"
    SELECTS = "for each element one of several values, chosen by truth value or size"


class Check(Enum):
    """A condition on an operator's values that is checked at each call (`passes.fx.checks`)."""

    NONZERO_DIVISOR = "no integer divisor is 0"
    NO_NAN = "nothing is NaN"
    ANY_ORDER = "the order of the factors does not matter"


@dataclass(frozen=True)
class Index:
    """Positions of the arguments that hold a non-negative index, and what it indexes.

    Attributes:
        source: The tensor that is read from or written to.
        dim: The dimension; None stands for the first.
        index: The index.
        stays_inside: Whether OpenVINO's kernel stays within the tensor's memory even for an index beyond its end.
    """

    source: int
    dim: int | None
    index: int
    stays_inside: bool = False


@dataclass(frozen=True)
class Bags:
    """Positions of the arguments that define the bags of an operator.

    Attributes:
        rows: The indices of the rows that are put into bags.
        offsets: Where each bag starts.
        includes_last: Whether a node's last offset is the end of the last bag, not the start of another.
    """

    rows: int
    offsets: int
    includes_last: Callable[[Node], bool]


@dataclass(frozen=True)
class Lifted:
    """How an operator that fails on scalars in OpenVINO runs on one-element tensors instead.

    Attributes:
        shaped_by: Position of the argument whose shape the result has; None if the result is a scalar, too.
    """

    shaped_by: int | None = None


@dataclass(frozen=True)
class TracedCall:
    """How an operator is called while TorchScript traces a graph (`backend.conversion.convert_ts`).

    Attributes:
        name: The operator's name in OpenVINO's TorchScript frontend.
        call: Called with the arguments of the overload.
        sized: Whether the tracer can follow symbolic sizes in them.
    """

    name: str
    call: Callable[..., Any]
    sized: bool = False


def stays_whole(*args: Any, **kwargs: Any) -> Any:
    """Declines all arguments: the decomposition of an operator that stays whole."""
    return NotImplemented


@dataclass(frozen=True, eq=False)
class Rule:
    """Everything that is declared for an operator.

    Attributes:
        verified: Whether OpenVINO's conversion is correct, although OpenVINO's own table lacks the operator.
        banned: Why OpenVINO's conversion is not used.
        limit: Returns why a node is not converted because of its arguments, by OpenVINO or by this package.
        limit_traced: Replaces ``limit`` where OpenVINO converts through TorchScript.
        first_output_only: What its other outputs are, which OpenVINO does not compute.
        draws: Whether a node of this operator draws random numbers; called only for operators that may.
        decompose: Its decomposition before partitioning; takes precedence over torch's.
        decompose_traced: Replaces ``decompose`` where OpenVINO converts through TorchScript.
        decompose_complex: Its decomposition for complex tensors, tried first.
        decompose_narrow: Its decomposition for integers and floats of 8 and 16 bits, tried first.
        decompose_strided: Its decomposition for tensors that are not contiguous, tried before all others.
        ordered_as: A function of the same arguments whose result on fake tensors has eager's memory order, where that
            of the operator itself differs.
        scalars: How it runs on scalars, if it fails on them in OpenVINO.
        never_decomposed: Whether torch's own decomposition is not used either.
        kept_whole: Whether the decomposition of torch's core table is not used, where OpenVINO converts the operator.
        convert: Builds it from OpenVINO operations; takes the arguments of its schema.
        facts: Computes further keyword arguments of ``convert`` from a node.
        traced: How TorchScript traces it.
        movement: Where its results come from, if it does no arithmetic.
        multiplies: Whether it multiplies its values with each other: integers exceed what OpenVINO computes exactly.
        adds: Whether it adds up values along ``dim``, or along all dimensions: its digits depend on their length.
        saturates: Whether torch, too, limits its 8-bit results to their type's range.
        integers: Bounds the integers that it returns; by default the largest among its arguments.
        range: Computes the least and largest integer that it returns.
        item_ranges: The same for each of several outputs.
        index: Its index argument.
        bags: Its bag arguments.
        check: What each call has to check.
    """

    verified: bool = False
    banned: str = ""
    limit: ArgumentLimit | None = None
    limit_traced: ArgumentLimit | None = None
    first_output_only: str = ""
    draws: Callable[[Node], bool] | None = None
    decompose: Decomposition | None = None
    decompose_traced: Decomposition | None = None
    decompose_complex: Decomposition | None = None
    decompose_narrow: Decomposition | None = None
    decompose_strided: Decomposition | None = None
    ordered_as: Callable[..., Any] | None = None
    scalars: Lifted | None = None
    never_decomposed: bool = False
    kept_whole: bool = False
    convert: Callable[..., Any] | None = None
    facts: Callable[[Node], dict[str, Any]] | None = None
    traced: TracedCall | None = None
    movement: Movement | None = None
    multiplies: bool = False
    adds: bool = False
    saturates: bool = False
    integers: "IntegerBound | None" = None
    range: "RangeRule | None" = None
    item_ranges: "tuple[RangeRule, ...]" = ()
    index: Index | None = None
    bags: Bags | None = None
    check: Check | None = None


# Keyed by the canonical name of an overload (aten.relu.default) or of a packet (aten.relu).
RULES: dict[str, Rule] = {}
_NOTHING = Rule()
_DEFAULTS = {field.name: field.default for field in fields(Rule)}


def declare(rule: Rule, *operators: Any) -> None:
    """Adds a rule to what is already declared for operators.

    Args:
        rule: Only fields that are not at their default are added.
        operators: Overloads, packets, or their canonical names.

    Raises:
        ValueError: A field is declared for a second time.
    """
    for operator in operators:
        name = str(operator)
        before, declared = RULES.get(name, _NOTHING), _said(rule)
        if again := declared.keys() & _said(before).keys():
            raise ValueError(f"{name}: {', '.join(sorted(again))} declared twice")
        RULES[name] = replace(before, **declared)


def decomposition(*operators: Any, rule: Rule = _NOTHING) -> Callable[[_F], _F]:
    """Declares a function as the decomposition of operators, along with other fields of their rule."""

    def declared(function: _F) -> _F:
        declare(replace(rule, decompose=function), *operators)
        return function

    return declared


def once(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Disables a decomposition while it runs, so that its own operator inside it is not decomposed endlessly."""
    inside = threading.local()

    @functools.wraps(decomposition)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "active", False):
            return NotImplemented
        inside.active = True
        try:
            return decomposition(*args, **kwargs)
        finally:
            inside.active = False

    return outermost


def conversion(*operators: Any, rule: Rule = _NOTHING) -> Callable[[_F], _F]:
    """Declares a function as the conversion of operators, along with other fields of their rule."""

    def declared(function: _F) -> _F:
        declare(replace(rule, convert=function), *operators)
        return function

    return declared


def rule_of(name: str) -> Rule:
    """Returns the rule of an overload: its packet's, updated with its own.

    Args:
        name: Canonical name; the rule is empty if nothing is declared for it.
    """
    return _together(RULES.get(packet_name(name), _NOTHING), RULES.get(name, _NOTHING))


def rules_that(say: Callable[[Rule], bool]) -> Mapping[str, Rule]:
    """Returns all rules that satisfy a predicate, by name."""
    return {name: rule for name, rule in RULES.items() if say(rule)}


def _said(rule: Rule) -> dict[str, Any]:
    return {name: getattr(rule, name) for name, default in _DEFAULTS.items() if getattr(rule, name) is not default}


@functools.lru_cache(maxsize=4096)
def _together(packet: Rule, overload: Rule) -> Rule:
    if overload is _NOTHING or packet is overload:
        return packet
    return overload if packet is _NOTHING else replace(packet, **_said(overload))


# Not counted outside a graph: operators by which Python reads a value, or that only handle memory.
_READS = packets(
    "_has_same_storage_numel _local_scalar_dense copy_ empty empty_like empty_strided is_nonzero item resize_ set_"
)


def computes(op: Any) -> bool:
    """Returns whether an operator counts as work. A higher-order one (torch.cond) does not; those it runs inside do."""
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or str(op.overloadpacket) in _READS:
        return False
    return rule_of(str(op)).movement is not Movement.REARRANGES
