"""Adds checks to a graph for the conditions on values under which OpenVINO computes what torch does.

An index out of range gives zeros in OpenVINO and an error in torch; a float that is cast to an integer wraps around or
saturates; a division by the integer 0 gives a number; sorting ignores NaN; a partial product overflows where torch
multiplies in another order. Inputs are checked before an inference (`spec.Bounds`). Values that are computed inside a
partition are checked by operators added to it, unless the graph alone proves them safe. Their results form one extra
output, with a 1 or a 0 per check. After a 0, the call runs in eager PyTorch, which computes the result or raises.

This output is read after the inference. Until then, a kernel that reads or writes at an index must not leave the
tensor's memory, and OpenVINO's kernels do (tests/contract pins it), so they get 0 instead of an index that fails its
check.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from torchserve_openvino.ops.names import op_name, tensors_of, value_of
from torchserve_openvino.ops.rule_registry import NARROW_INTEGERS, Check, rule_of
from torchserve_openvino.ops.symbolic_sizes import is_always_true
from torchserve_openvino.ops.value_range import ValueRanges
from torchserve_openvino.passes.fx.index_range import selections
from torchserve_openvino.passes.fx.int_range import is_cast_from_float
from torchserve_openvino.passes.fx.max_pools import holds_numbers, needs_numbers
from torchserve_openvino.passes.fx.nodes import add_call, size_of
from torchserve_openvino.passes.pass_context import Bounds, PassContext

aten = torch.ops.aten


@dataclass(frozen=True)
class ValueCheck:
    """A condition on values, checked at each call.

    Attributes:
        make: Builds the condition as a boolean node.
        sentence: What is wrong if the condition does not hold.
        index: The index that the condition is about, if it is about one; the condition has its shape.
    """

    make: Callable[[Graph], Node]
    sentence: str
    index: Node | None = None


_ANY_END = 2**63 - 1
_BY_ZERO = "a division by the integer 0"
# The largest finite float16, and the largest bfloat16 below it.
_LARGEST_AS_FLOAT16 = {torch.float32: 65504, torch.bfloat16: 65280}


def add_checks(graph: Graph, context: PassContext) -> None:
    """Adds an int32 output of shape ``[n]`` to a graph for n checks; adds nothing if there are none.

    Args:
        graph: A partition's graph; changed in place.
        context: Has the known ranges of its integers, and the limits of floats that are cast to integers. Gets one
            sentence per check: what is wrong if its element of the output is 0.
    """
    assert context.ranges is not None
    # The limits of casts are the same for all sizes.
    casts = context.limits[0].values
    answers: list[Node] = []
    sentences: list[str] = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        inside: dict[Node, Node] = {}
        for question in _questions(node, context.ranges, casts):
            with graph.inserting_before(node):
                holds = question.make(graph)
                dense = add_call(graph, aten.clone.default, holds, memory_format=torch.contiguous_format)
                flat = add_call(graph, aten.view.default, dense, [-1])
                number = add_call(graph, aten._to_copy.default, flat, dtype=torch.int32)
                if not is_always_true(value_of(number).numel() > 0):
                    # Of nothing, the smallest value is the type's largest.
                    one = add_call(graph, aten.new_full.default, number, [1], 1)
                    number = add_call(graph, aten.cat.default, [number, one])
                answers.append(add_call(graph, aten.amin.default, number, [0], True))
                if (index := question.index) is not None and not _stays_inside(node):
                    beyond = add_call(graph, aten.logical_not.default, holds)
                    inside[index] = add_call(graph, aten.masked_fill.Scalar, inside.get(index, index), beyond, 0)
            sentences.append(f"{op_name(node.target)}: {question.sentence}")
        for index, safe in inside.items():
            node.replace_input_with(index, safe)
    if answers:
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            together = add_call(graph, aten.cat.default, answers) if len(answers) > 1 else answers[0]
        output.args = ((*output.args[0], together),)
    context.checks = tuple(sentences)


def _stays_inside(node: Node) -> bool:
    """Checks whether OpenVINO's kernel for a node never accesses memory outside the tensor, whatever the index."""
    index = rule_of(op_name(node.target)).index
    return index is not None and index.stays_inside


def _questions(node: Node, ranges: ValueRanges, casts: Mapping[str, Bounds]) -> Iterator[ValueCheck]:
    check = rule_of(op_name(node.target)).check
    for source, dim, index, negative in selections(node):
        yield from _index(source, dim, index, negative, ranges)
    yield from _offsets(node)
    if op_name(node.target) == "aten._to_copy.default":
        yield from _cast(node, ranges, casts)
    elif check is Check.NONZERO_DIVISOR and not value_of(node).is_floating_point():
        yield from _divisor(node, ranges)
    elif check is Check.NO_NAN:
        source = node.all_input_nodes[0]
        if value_of(source).is_floating_point():
            yield ValueCheck(lambda graph: add_call(graph, aten.eq.Tensor, source, source), "OpenVINO passes over NaN")
    elif needs_numbers(node):
        yield ValueCheck(lambda graph: holds_numbers(graph, node), "the index of a largest value that is -inf or NaN")
    elif check is Check.ANY_ORDER and value_of(node).is_floating_point():
        yield from _product(node)


def _offsets(node: Node) -> Iterator[ValueCheck]:
    """Yields checks of where bags start: the first one at element 0, none behind the last element."""
    rule = rule_of(op_name(node.target))
    if rule.bags is None or (rule.facts is not None and rule.facts(node)["regular"]):
        return
    offsets, rows, includes_last = node.args[rule.bags.offsets], node.args[rule.bags.rows], rule.bags.includes_last
    assert isinstance(offsets, Node) and isinstance(rows, Node)
    if offsets.op == "placeholder" and isinstance(value_of(rows).shape[0], int):
        # Checked before the inference (`index_range`).
        return

    def length(graph: Graph) -> Any:
        return size_of(graph, rows, 0)

    def at(graph: Graph, start: int, end: int) -> Node:
        return add_call(graph, aten.slice.Tensor, offsets, 0, start, end)

    sentence = "an offset that is outside its elements"
    yield ValueCheck(lambda graph: add_call(graph, aten.le.Scalar, offsets, length(graph)), sentence, offsets)
    yield ValueCheck(lambda graph: add_call(graph, aten.ge.Scalar, offsets, 0), sentence, offsets)
    yield ValueCheck(lambda graph: add_call(graph, aten.eq.Scalar, at(graph, 0, 1), 0), "a first offset that is not 0")
    if includes_last(node):
        yield ValueCheck(
            lambda graph: add_call(graph, aten.eq.Scalar, at(graph, -1, _ANY_END), length(graph)),
            "a last offset that is not the number of elements",
        )


def _product(node: Node) -> Iterator[ValueCheck]:
    """Yields a check that the order of the factors does not matter: a partial product may overflow, or underflow.

    The product of all factors of at least 1 is an upper bound of every partial product, that of all others a lower one.
    With a factor of 0 the product is 0 in any order; without a factor above 1 it underflows in every order or in none.
    """
    source, how, limits = node.all_input_nodes[0], node.args[1:], torch.finfo(value_of(node).dtype)

    def of(graph: Graph, factors: Node) -> Node:
        return add_call(graph, node.target, factors, *how, **node.kwargs)

    def holds_in_any_order(graph: Graph) -> Node:
        size = add_call(graph, aten.abs.default, source)
        most = of(graph, add_call(graph, aten.clamp_min.default, size, 1.0))
        least = of(graph, add_call(graph, aten.clamp_max.default, size, 1.0))
        does_not_overflow = add_call(graph, aten.le.Scalar, most, limits.max)
        small = add_call(graph, aten.le.Scalar, most, 1.0)
        zero = add_call(graph, aten.eq.Scalar, of(graph, add_call(graph, aten.sign.default, size)), 0.0)
        vanishes = add_call(graph, aten.lt.Scalar, least, limits.tiny)
        remains = add_call(graph, aten.logical_not.default, vanishes)
        in_every_order = add_call(graph, aten.logical_or.default, zero, small)
        does_not_vanish = add_call(graph, aten.logical_or.default, in_every_order, remains)
        return add_call(graph, aten.logical_and.default, does_not_overflow, does_not_vanish)

    yield ValueCheck(holds_in_any_order, "the order in which factors are multiplied matters")


def _index(source: Node, dim: int, index: Node, negative: bool, ranges: ValueRanges) -> Iterator[ValueCheck]:
    """Yields checks that an index is in range; with ``negative``, one below 0 counts from the end."""
    size = value_of(source).shape[dim]
    known, sentence = ranges.of(index), f"an index beyond the dimension of {size}"
    least = -size if negative and isinstance(size, int) else 0
    if isinstance(size, int) and known is not None and least <= known[0] and known[1] < size:
        return
    yield ValueCheck(lambda graph: add_call(graph, aten.lt.Scalar, index, size_of(graph, source, dim)), sentence, index)
    if known is not None and known[0] >= 0:
        return
    if negative and not isinstance(size, int):

        def after_the_first(graph: Graph) -> Node:
            from_start = add_call(graph, aten.add.Tensor, index, size_of(graph, source, dim))
            return add_call(graph, aten.ge.Scalar, from_start, 0)

        yield ValueCheck(after_the_first, sentence, index)
    else:
        yield ValueCheck(lambda graph: add_call(graph, aten.ge.Scalar, index, least), sentence, index)


def _cast(node: Node, ranges: ValueRanges, casts: Mapping[str, Bounds]) -> Iterator[ValueCheck]:
    source, target = node.all_input_nodes[0], value_of(node).dtype
    kind = next((tensor.dtype for tensor in tensors_of(value_of(source))), None)
    if kind is None or kind is target:
        return
    if is_cast_from_float(node):
        most = casts[node.name].high
        yield from _within(source, -most, most, f"a float that becomes an integer exceeds {most}")
    elif target in NARROW_INTEGERS:
        limits, known = torch.iinfo(target), ranges.of(source)
        if kind.is_floating_point or known is None or known[0] < limits.min or known[1] > limits.max:
            yield from _within(source, limits.min, limits.max, f"a value outside the range of {target} wraps around")
    elif target is torch.float16 and (largest := _LARGEST_AS_FLOAT16.get(kind)) is not None:
        yield from _within(source, -largest, largest, "a value beyond float16, which OpenVINO does not make infinite")


def _within(source: Node, low: int, high: int, sentence: str) -> Iterator[ValueCheck]:
    if value_of(source).dtype is torch.float16:
        # A bound that float16 lacks would become infinite, and infinity pass the check.
        most = int(torch.finfo(torch.float16).max)
        low, high = max(low, -most), min(high, most)
    # In this form NaN fails the check; OpenVINO's "greater" would be true for it.
    yield ValueCheck(lambda graph: add_call(graph, aten.le.Scalar, source, high), sentence)
    if value_of(source).dtype is not torch.uint8:
        floats = value_of(source).is_floating_point()

        def above(graph: Graph) -> Node:
            if not floats:
                return add_call(graph, aten.ge.Scalar, source, low)
            return add_call(graph, aten.le.Scalar, add_call(graph, aten.neg.default, source), -low)

        yield ValueCheck(above, sentence)


def _divisor(node: Node, ranges: ValueRanges) -> Iterator[ValueCheck]:
    divisor: Any = node.args[1]
    if not isinstance(divisor, Node) and divisor == 0:
        # The check always fails, so that the call runs in eager PyTorch, which raises.
        yield ValueCheck(lambda graph: add_call(graph, aten.full.default, [1], False, dtype=torch.bool), _BY_ZERO)
    known = ranges.of(divisor)
    if not isinstance(divisor, Node) or (known is not None and not known[0] <= 0 <= known[1]):
        return
    size = value_of(divisor)
    if not isinstance(size, torch.SymInt) or not is_always_true(size != 0):
        yield ValueCheck(lambda graph: _is_not_zero(graph, divisor), _BY_ZERO)


def _is_not_zero(graph: Graph, divisor: Node) -> Node:
    """Builds the condition that a divisor, a tensor or a symbolic size, is not 0."""
    if isinstance(value_of(divisor), torch.SymInt):
        divisor = add_call(graph, aten.full.default, [1], divisor, dtype=torch.int64)
    return add_call(graph, aten.ne.Scalar, divisor, 0)
