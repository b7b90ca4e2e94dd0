"""What this package knows of each operator: one rule for an overload, or for all overloads of a packet.

The rules are declared in `ops.rules`, by families of operators, and read by everyone else: the capability check
(`ops.support`), the decomposition table (`ops.decompositions`), the converters, and what follows integers and indices
through a graph. A rule says only what is special; an operator without a rule is converted by OpenVINO if OpenVINO's own
table names it.
"""

import functools
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

# Reasons against OpenVINO's own conversion that several operators share.
FAILS = "its conversion in OpenVINO fails"
SHAPE = "the shape of its result depends on the values of its input"
INSTEAD = "; a decomposition computes it instead"

# Returns NotImplemented for arguments that it is not for.
Decomposition = Callable[..., Any]
# The reason against a node, or None.
ArgumentLimit = Callable[[Node], str | None]
_F = TypeVar("_F", bound=Callable[..., Any])


class Movement(Enum):
    """How an operator that computes nothing gets its values; such operators are exact in every type."""

    REARRANGES = "some or all values of its inputs, in another order, shape or type"
    LOOKS_UP = "values of one input, chosen by another"
    FILLS = "a stated value, or values of an input that is not the first"
    COMPARES = "truth values"
    SELECTS = "one of several values each, by their truth or size"


class Check(Enum):
    """What must hold of an operator's values at each call (`backend.lowering.checks`)."""

    NONZERO_DIVISOR = "no integer divisor is 0"
    NO_NAN = "nothing is NaN"
    ANY_ORDER = "the order of the factors does not matter"


@dataclass(frozen=True)
class Index:
    """Which argument is an index, from 0 up, and into what; positions of arguments.

    Attributes:
        source: The tensor that is selected from, or written to.
        dim: The dimension; None stands for the first.
        index: The index.
        stays_inside: Whether OpenVINO's kernel leaves the tensor's memory alone for an index beyond its end.
    """

    source: int
    dim: int | None
    index: int
    stays_inside: bool = False


@dataclass(frozen=True)
class Bags:
    """Which arguments of an operator say where bags start; positions of arguments.

    Attributes:
        rows: What is put into bags.
        offsets: Where each bag starts.
        includes_last: Whether the last offset of a node is the end.
    """

    rows: int
    offsets: int
    includes_last: Callable[[Node], bool]


@dataclass(frozen=True)
class Lifted:
    """An operator that fails on scalars in OpenVINO runs on tensors of one element instead.

    Attributes:
        shaped_by: Position of the argument whose shape the result has; without it a result is a scalar, too.
    """

    shaped_by: int | None = None


@dataclass(frozen=True)
class Traced:
    """How an operator is called while TorchScript traces a graph (`backend.conversion.convert_ts`).

    Attributes:
        name: Of the operator that OpenVINO's TorchScript frontend knows.
        call: Takes the arguments of the overload.
        sized: Whether the tracer sees through symbolic sizes in them.
    """

    name: str
    call: Callable[..., Any]
    sized: bool = False


def stays_whole(*args: Any, **kwargs: Any) -> Any:
    """The decomposition of what has none."""
    return NotImplemented


@dataclass(frozen=True, eq=False)
class Rule:
    """All that is said of an operator.

    Attributes:
        verified: Whether OpenVINO's conversion is right, although OpenVINO's own table lacks the operator.
        banned: Why OpenVINO's conversion is not used.
        limit: For which arguments a conversion is not used, OpenVINO's or ours.
        limit_traced: The same instead, where OpenVINO converts through TorchScript.
        first_output_only: What its other outputs are, which OpenVINO does not compute.
        draws: Whether a node of this operator draws random numbers; only asked of operators that may.
        decompose: What it is taken apart into before partitioning; wins over torch's decomposition.
        decompose_traced: The same instead, where OpenVINO converts through TorchScript.
        decompose_complex: The same for complex tensors, tried first.
        decompose_strided: The same for tensors that are not contiguous, tried before all others.
        ordered_as: An operator of the same arguments whose memory order on fake tensors is eager's, where that of this
            operator's kernel for them is another.
        scalars: For an operator that fails on scalars.
        never_decomposed: Whether torch's own decomposition is not used either.
        kept_whole: Whether torch's core table does not take it apart, where OpenVINO converts it.
        convert: Builds it of OpenVINO's operations; takes the arguments of its schema.
        facts: Makes keyword arguments of ``convert`` from a node, beside the operator's own.
        traced: How it is traced by TorchScript.
        movement: How it gets its values, if it computes nothing.
        multiplies: Whether it multiplies its values with each other: integers exceed what OpenVINO computes exactly.
        integers: The largest integer that it returns; by default the largest among its arguments.
        range: Least and largest integer that it returns.
        item_ranges: The same for each of several outputs.
        index: Its index.
        bags: Its bags.
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
    decompose_strided: Decomposition | None = None
    ordered_as: Callable[..., Any] | None = None
    scalars: Lifted | None = None
    never_decomposed: bool = False
    kept_whole: bool = False
    convert: Callable[..., Any] | None = None
    facts: Callable[[Node], dict[str, Any]] | None = None
    traced: Traced | None = None
    movement: Movement | None = None
    multiplies: bool = False
    integers: "IntegerBound | None" = None
    range: "RangeRule | None" = None
    item_ranges: "tuple[RangeRule, ...]" = ()
    index: Index | None = None
    bags: Bags | None = None
    check: Check | None = None


# By canonical name: of an overload (aten.relu.default), or of a packet (aten.relu).
RULES: dict[str, Rule] = {}
_NOTHING = Rule()
_DEFAULTS = {field.name: field.default for field in fields(Rule)}


def declare(rule: Rule, *operators: Any) -> None:
    """Adds what a rule says to what was said before.

    Args:
        rule: Its fields that are not at their default.
        operators: Overloads, packets, or their canonical names.

    Raises:
        ValueError: Something is said for a second time.
    """
    for operator in operators:
        name = str(operator)
        before, said = RULES.get(name, _NOTHING), _said(rule)
        if again := said.keys() & _said(before).keys():
            raise ValueError(f"{name}: {', '.join(sorted(again))} declared twice")
        RULES[name] = replace(before, **said)


def decomposition(*operators: Any, rule: Rule = _NOTHING) -> Callable[[_F], _F]:
    """Declares a function as the decomposition of operators, with what else there is to say of them."""

    def declared(function: _F) -> _F:
        declare(replace(rule, decompose=function), *operators)
        return function

    return declared


def conversion(*operators: Any, rule: Rule = _NOTHING) -> Callable[[_F], _F]:
    """Declares a function as the conversion of operators, with what else there is to say of them."""

    def declared(function: _F) -> _F:
        declare(replace(rule, convert=function), *operators)
        return function

    return declared


def rule_of(name: str) -> Rule:
    """What is known of an overload: of itself, and of its packet.

    Args:
        name: Canonical; one that is not an operator's has an empty rule.
    """
    return _together(RULES.get(packet_name(name), _NOTHING), RULES.get(name, _NOTHING))


def rules_that(say: Callable[[Rule], bool]) -> Mapping[str, Rule]:
    """All rules of which something holds."""
    return {name: rule for name, rule in RULES.items() if say(rule)}


def _said(rule: Rule) -> dict[str, Any]:
    return {name: getattr(rule, name) for name, default in _DEFAULTS.items() if getattr(rule, name) is not default}


@functools.lru_cache(maxsize=4096)
def _together(packet: Rule, overload: Rule) -> Rule:
    if overload is _NOTHING or packet is overload:
        return packet
    return overload if packet is _NOTHING else replace(packet, **_said(overload))


# Not counted outside a graph: how Python reads a value, and memory without values.
_READS = packets(
    "_has_same_storage_numel _local_scalar_dense copy_ empty empty_like empty_strided is_nonzero item resize_ set_"
)


def computes(op: Any) -> bool:
    """Whether an operator does work, and counts. One of higher order (torch.cond) does not: what runs inside does."""
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or str(op.overloadpacket) in _READS:
        return False
    return rule_of(str(op)).movement is not Movement.REARRANGES
