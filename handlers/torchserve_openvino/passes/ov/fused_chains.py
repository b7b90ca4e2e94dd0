"""Finds models that would crash OpenVINO's CPU plugin while it fuses operators, before they are compiled.

The plugin first fuses two kinds of chains into one kernel each: 2-d matrix multiplications by constants with
elementwise operators in between (a small MLP), and attention. Then it fuses the remaining elementwise operators. If one
of these takes both a finished chain and another fused operator as inputs, the plugin dereferences a null pointer and
the process crashes: ``h + tanh(linear(relu(linear(h))))`` with a computed ``h`` is enough. OpenVINO 2026.4,
``src/common/snippets/src/utils/tokenization_utils.cpp``: ``clones[input_node]`` of a subgraph marked ``Completed``
(tests/contract/test_openvino.py). Such a model is compiled without this fusion (`NO_FUSION`), which costs up to a fifth
of the run time of small MLPs, and mostly nothing.
"""

from collections.abc import Iterator

import openvino as ov

NO_FUSION = {"SNIPPETS_MODE": "DISABLE"}

# Allowed between two matrix multiplications of a chain, and after the last one.
ELEMENTWISE = frozenset({
    "Abs", "Add", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceiling", "Clamp", "Convert", "Cos", "Divide",
    "Elu", "Equal", "Erf", "Exp", "FakeQuantize", "Floor", "FloorMod", "Gelu", "Greater", "GreaterEqual", "HSigmoid",
    "HSwish", "IsFinite", "IsInf", "IsNaN", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr",
    "LogicalXor", "Maximum", "Minimum", "Mish", "Mod", "Multiply", "Negative", "NotEqual", "PRelu", "Power",
    "Relu", "Round", "Select", "Sigmoid", "Sign", "Sin", "SoftPlus", "Softmax", "Sqrt", "SquaredDifference", "Subtract",
    "Swish", "Tanh",
})  # fmt: skip
# The plugin decomposes them, and the last operator of the result is elementwise.
_BECOME_ELEMENTWISE = frozenset({"BatchNormInference", "LogSoftmax", "NormalizeL2", "SoftSign"})
# The plugin rewrites a subtraction as a sum with the negative, and a division as a product with a power.
_TURN_THE_SECOND = frozenset({"Subtract", "Divide"})
# The plugin converts an Einsum to a MatMul.
_MULTIPLICATIONS = frozenset({"MatMul", "Einsum"})
_TO_A_SHAPE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Broadcast"})
_IN_ATTENTION = ELEMENTWISE | _TO_A_SHAPE | {"Transpose"}


def crashes_plugin(model: ov.Model) -> str:
    """Returns the name of an operator at which the CPU plugin might crash; empty if there is none."""
    ends = (node for node in model.get_ops() if _ends_chain(node))
    return next((reason for node in ends if (reason := _meeting(node))), "")


def _ends_chain(node: ov.Node) -> bool:
    """Checks whether an operator might end a chain: a matrix multiplication with another of its kind upstream."""
    kind = node.get_type_name()
    if kind not in _MULTIPLICATIONS:
        return kind == "ScaledDotProductAttention"
    constant = by_constant(node)
    rank = node.get_output_partial_shape(0).rank
    if constant and rank.is_static and rank.get_length() > 2:
        return False
    between = ELEMENTWISE if constant else _IN_ATTENTION
    return any(
        node.get_type_name() in _MULTIPLICATIONS and by_constant(node) == constant
        for node in upstream(node.input_value(0).get_node(), between)
    )


def by_constant(multiplication: ov.Node) -> bool:
    """Checks whether any operand other than the first is a constant."""
    return any(is_constant(value.get_node()) for value in multiplication.input_values()[1:])


def _meeting(node: ov.Node) -> str:
    """Returns the name of an elementwise operator that takes a chain's end and another fused operator, or empty."""
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
            if kind == "Transpose" or _changes_nothing(consumer):
                waiting.append(consumer)
            elif kind in ELEMENTWISE:
                if _takes_another(consumer, name):
                    return str(consumer.get_friendly_name())
                waiting.append(consumer)
    return ""


def _takes_another(consumer: ov.Node, name: str) -> bool:
    """Checks whether an operator, beside the node of this name, takes one that the plugin might fuse separately."""
    operands = [value.get_node() for value in consumer.input_values()]
    others = [operand for operand in operands if operand.get_name() != name]
    if consumer.get_type_name() in _TURN_THE_SECOND and operands[1].get_name() != name and not is_constant(operands[1]):
        return True
    return any(map(_is_fused, others))


def _is_fused(node: ov.Node) -> bool:
    """Checks whether the plugin might fuse an operator separately from the chain."""
    while _changes_nothing(node):
        node = node.input_value(0).get_node()
    if node.get_type_name() == "Parameter":
        # The plugin first converts it to float32, which is an elementwise operator.
        return bool(node.get_output_element_type(0) == ov.Type.f16)
    return node.get_type_name() in ELEMENTWISE | _BECOME_ELEMENTWISE and not is_constant(node)


def _changes_nothing(node: ov.Node) -> bool:
    """Checks whether the plugin removes an operator: a conversion to the same type, or a move to the same shape."""
    kind = node.get_type_name()
    if kind == "Convert":
        return bool(node.get_input_element_type(0) == node.get_output_element_type(0))
    return kind in _TO_A_SHAPE and node.get_input_partial_shape(0) == node.get_output_partial_shape(0)


def is_constant(node: ov.Node) -> bool:
    """Checks whether the plugin folds a node into a constant."""
    return all(node.get_type_name() not in {"Parameter", "ReadValue"} for node in upstream(node))


def upstream(node: ov.Node, through: frozenset[str] | None = None) -> Iterator[ov.Node]:
    """Yields a node and the nodes it depends on, each once; with ``through``, follows only operators of these types."""
    waiting, seen = [node], set()
    while waiting:
        producer = waiting.pop()
        if (name := producer.get_name()) in seen:
            continue
        seen.add(name)
        yield producer
        kind = producer.get_type_name()
        # A static shape is a constant, whatever the tensor.
        known = kind == "ShapeOf" and producer.get_input_partial_shape(0).is_static
        if not known and (through is None or kind in through):
            waiting += [value.get_node() for value in producer.input_values()]
