"""Models that OpenVINO's CPU plugin crashes on while it fuses operators, found before they are compiled.

The plugin fuses two kinds of chains into one kernel first: matrix multiplications of two dimensions by constants with
elementwise operators in between (a small MLP), and attention. Then it fuses the elementwise operators that are left.
Where one of these takes both a finished chain and another fused operator, it follows a null pointer, and the process
ends: ``h + tanh(linear(relu(linear(h))))`` with ``h`` computed is enough. OpenVINO 2026.4,
``src/common/snippets/src/utils/tokenization_utils.cpp``: ``clones[input_node]`` of a subgraph marked ``Completed``
(tests/contract/test_openvino.py). Such a model is compiled without this fusion, `NO_FUSION`; it costs up to a fifth of
the time of small MLPs, and mostly nothing.
"""

from collections.abc import Iterator

import openvino as ov

NO_FUSION = {"SNIPPETS_MODE": "DISABLE"}

# Between two matrix multiplications of a chain, and behind the last one.
ELEMENTWISE = frozenset({
    "Abs", "Add", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceiling", "Clamp", "Convert", "Cos", "Divide",
    "Elu", "Equal", "Erf", "Exp", "FakeQuantize", "Floor", "FloorMod", "Gelu", "Greater", "GreaterEqual", "HSigmoid",
    "HSwish", "IsFinite", "IsInf", "IsNaN", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr",
    "LogicalXor", "Maximum", "Minimum", "Mish", "Mod", "Multiply", "Negative", "NotEqual", "PRelu", "Power",
    "Relu", "Round", "Select", "Sigmoid", "Sign", "Sin", "SoftPlus", "Softmax", "Sqrt", "SquaredDifference", "Subtract",
    "Swish", "Tanh",
})  # fmt: skip
# The plugin takes them apart, and the last part is elementwise.
_BECOME_ELEMENTWISE = frozenset({"BatchNormInference", "LogSoftmax", "NormalizeL2", "SoftSign"})
# The plugin makes the sum with a negative, and the product with a power, of them.
_TURN_THE_SECOND = frozenset({"Subtract", "Divide"})
# The plugin makes an Einsum into the other.
_MULTIPLICATIONS = frozenset({"MatMul", "Einsum"})
_IN_ATTENTION = ELEMENTWISE | {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Broadcast"}


def crashes_plugin(model: ov.Model) -> str:
    """Name of an operator at which the CPU plugin might crash; empty where there is none."""
    ends = (node for node in model.get_ops() if _ends_chain(node))
    return next((found for node in ends if (found := _meeting(node))), "")


def _ends_chain(node: ov.Node) -> bool:
    """Whether an operator might end a chain: a matrix multiplication, and another of its kind stands before it."""
    kind = node.get_type_name()
    if kind not in _MULTIPLICATIONS:
        return kind == "ScaledDotProductAttention"
    constant = by_constant(node)
    rank = node.get_output_partial_shape(0).rank
    if constant and rank.is_static and rank.get_length() > 2:
        return False
    between = ELEMENTWISE if constant else _IN_ATTENTION
    return any(
        each.get_type_name() in _MULTIPLICATIONS and by_constant(each) == constant
        for each in _upstream(node.input_value(0).get_node(), between)
    )


def by_constant(multiplication: ov.Node) -> bool:
    """Whether an operand but the first is a constant."""
    return any(is_constant(value.get_node()) for value in multiplication.input_values()[1:])


def _meeting(node: ov.Node) -> str:
    """Where the end of a chain meets the result of another elementwise operator, in an elementwise operator."""
    waiting, seen = [node], set()
    while waiting:
        source = waiting.pop()
        name = source.get_name()
        if name in seen:
            continue
        seen.add(name)
        for target in source.output(0).get_target_inputs():
            consumer = target.get_node()
            kind = consumer.get_type_name()
            if kind == "Transpose":
                waiting.append(consumer)
            elif kind in ELEMENTWISE:
                if _takes_another(consumer, name):
                    return str(consumer.get_friendly_name())
                waiting.append(consumer)
    return ""


def _takes_another(consumer: ov.Node, name: str) -> bool:
    """Whether an operator takes what the plugin might fuse on its own, beside the node of this name."""
    operands = [value.get_node() for value in consumer.input_values()]
    others = [each for each in operands if each.get_name() != name]
    if consumer.get_type_name() in _TURN_THE_SECOND and operands[1].get_name() != name and not is_constant(operands[1]):
        return True
    return any(map(_is_fused, others))


def _is_fused(node: ov.Node) -> bool:
    """Whether the plugin might fuse an operator on its own."""
    while node.get_type_name() == "Convert" and node.get_input_element_type(0) == node.get_output_element_type(0):
        node = node.input_value(0).get_node()
    if node.get_type_name() == "Parameter":
        # The plugin converts it to float32 first, element by element.
        return bool(node.get_output_element_type(0) == ov.Type.f16)
    return node.get_type_name() in ELEMENTWISE | _BECOME_ELEMENTWISE and not is_constant(node)


def is_constant(node: ov.Node) -> bool:
    """Whether the plugin folds it into a constant."""
    return all(each.get_type_name() not in {"Parameter", "ReadValue"} for each in _upstream(node))


def _upstream(node: ov.Node, through: frozenset[str] | None = None) -> Iterator[ov.Node]:
    """A node and those that its value is made of, each once; with ``through`` only behind operators of these types."""
    waiting, seen = [node], set()
    while waiting:
        each = waiting.pop()
        if (name := each.get_name()) in seen:
            continue
        seen.add(name)
        yield each
        kind = each.get_type_name()
        # A known shape is a constant, whatever it is the shape of.
        known = kind == "ShapeOf" and each.get_input_partial_shape(0).is_static
        if not known and (through is None or kind in through):
            waiting += [value.get_node() for value in each.input_values()]
