"""What must hold of a call's values so that OpenVINO computes as torch does, looked at inside the graph.

An index beyond the end gives zeros in OpenVINO and an error in torch; an integer made of a float wraps around or
saturates; a division by the integer 0 gives a number; sorting passes over NaN; a part of a product overflows where
torch multiplies in another order. Inputs are looked at before an inference
(`spec.Bounds`). What is computed inside a partition is looked at by operators that are added to it, where the graph
alone does not show that all is well: they end in one more output, a 1 or a 0 for each question. After a 0 the call runs
in eager PyTorch, which answers or raises as it always does.

The answers are read after the inference. Until then a kernel that looks up or writes at an index must not leave the
tensor's memory, and OpenVINO's kernels do (tests/contract pins it), so an index that fails its question is 0 for them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchserve_openvino.backend.lowering.index_range import selections
from torchserve_openvino.backend.lowering.int_range import is_cast_from_float
from torchserve_openvino.backend.lowering.rewrite import add_call, size_of
from torchserve_openvino.backend.spec import Bounds
from torchserve_openvino.ops.names import op_name, tensors_of, value_of
from torchserve_openvino.ops.registry import Check, rule_of
from torchserve_openvino.ops.value_range import ValueRanges

aten = torch.ops.aten


@dataclass(frozen=True)
class Question:
    """A condition on values.

    Attributes:
        make: Builds it as a boolean node.
        sentence: What is wrong where it does not hold.
        index: The node that it is asked of, where that is an index; the condition has its shape.
    """

    make: Callable[[Graph], Node]
    sentence: str
    index: Node | None = None


_NARROW = frozenset({torch.uint8, torch.int8})


def add_checks(graph: Graph, ranges: ValueRanges, casts: Mapping[str, Bounds]) -> tuple[str, ...]:
    """Adds an int32 output ``[n]`` to a graph for n questions; nothing where there are none.

    Args:
        graph: A partition's graph; changed in place.
        ranges: What is known of its integers.
        casts: Limits of floats that become integers (`int_range`), by the node's name.

    Returns:
        What is wrong where the answer is 0, a sentence for each question.
    """
    answers: list[Node] = []
    sentences: list[str] = []
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        inside: dict[Node, Node] = {}
        for question in _questions(node, ranges, casts):
            with graph.inserting_before(node):
                holds = question.make(graph)
                dense = add_call(graph, aten.clone.default, holds, memory_format=torch.contiguous_format)
                flat = add_call(graph, aten.view.default, dense, [-1])
                number = add_call(graph, aten._to_copy.default, flat, dtype=torch.int32)
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
    return tuple(sentences)


def _stays_inside(node: Node) -> bool:
    """Whether OpenVINO's kernel for a node leaves the tensor's memory alone, whatever its index."""
    index = rule_of(op_name(node.target)).index
    return index is not None and index.stays_inside


def _questions(node: Node, ranges: ValueRanges, casts: Mapping[str, Bounds]) -> Iterator[Question]:
    check = rule_of(op_name(node.target)).check
    for source, dim, index, negative in selections(node):
        yield from _index(source, dim, index, negative, ranges)
    if op_name(node.target) == "aten._to_copy.default":
        yield from _cast(node, ranges, casts)
    elif check is Check.NONZERO_DIVISOR and not value_of(node).is_floating_point():
        yield from _divisor(node, ranges)
    elif check is Check.NO_NAN:
        source = node.all_input_nodes[0]
        if value_of(source).is_floating_point():
            yield Question(lambda graph: add_call(graph, aten.eq.Tensor, source, source), "OpenVINO passes over NaN")
    elif check is Check.ANY_ORDER and value_of(node).is_floating_point():
        yield from _product(node)


def _product(node: Node) -> Iterator[Question]:
    """Whether the order of the factors doesn't matter: a part of a product may overflow, or vanish.

    All factors of at least 1 together are more than any part of the product, all others together are less. With a
    factor of 0 the product is 0, whatever vanishes; without a factor beyond 1 it vanishes in every order.
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

    yield Question(holds_in_any_order, "the order in which factors are multiplied matters")


def _index(source: Node, dim: int, index: Node, negative: bool, ranges: ValueRanges) -> Iterator[Question]:
    """Whether an index lies within its dimension; below 0 is from the end where ``negative`` says so."""
    size = value_of(source).shape[dim]
    known, sentence = ranges.of(index), f"an index beyond the dimension of {size}"
    least = -size if negative and isinstance(size, int) else 0
    if isinstance(size, int) and known is not None and least <= known[0] and known[1] < size:
        return
    yield Question(lambda graph: add_call(graph, aten.lt.Scalar, index, size_of(graph, source, dim)), sentence, index)
    if known is not None and known[0] >= 0:
        return
    if negative and not isinstance(size, int):

        def after_the_first(graph: Graph) -> Node:
            from_start = add_call(graph, aten.add.Tensor, index, size_of(graph, source, dim))
            return add_call(graph, aten.ge.Scalar, from_start, 0)

        yield Question(after_the_first, sentence, index)
    else:
        yield Question(lambda graph: add_call(graph, aten.ge.Scalar, index, least), sentence, index)


def _cast(node: Node, ranges: ValueRanges, casts: Mapping[str, Bounds]) -> Iterator[Question]:
    source, target = node.all_input_nodes[0], value_of(node).dtype
    kind = next((tensor.dtype for tensor in tensors_of(value_of(source))), None)
    if kind is None or kind is target:
        return
    if is_cast_from_float(node):
        most = casts[node.name].high
        yield from _within(source, -most, most, f"a float that becomes an integer exceeds {most}")
    elif target in _NARROW:
        limits, known = torch.iinfo(target), ranges.of(source)
        if kind.is_floating_point or known is None or known[0] < limits.min or known[1] > limits.max:
            yield from _within(source, limits.min, limits.max, f"a value outside the range of {target} wraps around")
    elif target is torch.float16 and kind is torch.float32:
        most = int(torch.finfo(target).max)
        yield from _within(source, -most, most, "a value beyond float16, which OpenVINO does not make infinite")


def _within(source: Node, low: int, high: int, sentence: str) -> Iterator[Question]:
    # Asked this way, NaN is not within: OpenVINO's "greater" is true of it.
    yield Question(lambda graph: add_call(graph, aten.le.Scalar, source, high), sentence)
    if value_of(source).dtype is not torch.uint8:
        floats = value_of(source).is_floating_point()

        def above(graph: Graph) -> Node:
            if not floats:
                return add_call(graph, aten.ge.Scalar, source, low)
            return add_call(graph, aten.le.Scalar, add_call(graph, aten.neg.default, source), -low)

        yield Question(above, sentence)


def _divisor(node: Node, ranges: ValueRanges) -> Iterator[Question]:
    divisor: Any = node.args[1]
    known = ranges.of(divisor)
    if not isinstance(divisor, Node) or (known is not None and not known[0] <= 0 <= known[1]):
        return
    size = value_of(divisor)
    if not isinstance(size, torch.SymInt) or not statically_known_true(size != 0):
        yield Question(lambda graph: _is_not_zero(graph, divisor), "a division by the integer 0")


def _is_not_zero(graph: Graph, divisor: Node) -> Node:
    """Of a tensor, or of a size."""
    if isinstance(value_of(divisor), torch.SymInt):
        divisor = add_call(graph, aten.full.default, [1], divisor, dtype=torch.int64)
    return add_call(graph, aten.ne.Scalar, divisor, 0)
