"""Replaces the nodes of a partition that a mapping converts, just before the partition is converted.

An OpenVINO extension receives a node's arguments as OpenVINO constants and sequences, and can't return several outputs
in an FX graph. So each mapped node is replaced by one node per used output, which takes only other nodes as arguments;
its translator calls the mapping with the arguments of the operator's schema.
"""

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openvino as ov
import torch
from torch.fx import Graph, Node

from torchserve_openvino.backend.conversion.mapped_modules import module_call
from torchserve_openvino.backend.spec import spec_of
from torchserve_openvino.backend.upstream._openvino_private import Translator, call_translator
from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.ops.mappings import Convert, Mappings
from torchserve_openvino.ops.names import op_name, tensors_of, value_of


@dataclass
class Mapped:
    """Translators for the replaced nodes, and the error that one of them raised; the frontend keeps only its text.

    Attributes:
        failed_op: Name of the operator whose translator failed; empty if none did.
    """

    translators: list[tuple[str, Translator]] = field(default_factory=list)
    failed_op: str = ""
    error: Exception | None = None


def replace_mapped(graph: Graph, mappings: Mappings, constants: frozenset[str]) -> Mapped:
    """Replaces mapped nodes in place.

    Args:
        graph: The graph of a partition; its nodes have fake values.
        mappings: The registered mappings.
        constants: Names of the nodes that are constants. A mapped module is built with its own weights, which must be
            among them.

    Raises:
        OpMappingError: A module's weights are not constants.
    """
    mapped = Mapped()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        call = module_call(node, constants)
        bound = Bound(*call) if call is not None else _operator_call(node, mappings)
        if bound is not None:
            _replace(graph, node, bound, mapped)
    return mapped


@dataclass
class Bound:
    """A mapping with the arguments of one node.

    Attributes:
        convert: The mapping.
        args: Positional arguments; nodes stand for computed values.
        kwargs: Keyword arguments.
        own: Whether the mapping is this package's own.
    """

    convert: Convert
    args: Sequence[Any]
    kwargs: dict[str, Any]
    own: bool = False


def _operator_call(node: Node, mappings: Mappings) -> Bound | None:
    name = op_name(node.target)
    convert = mappings.converts(name)
    if convert is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
        plain = not isinstance(value, (Node, list, tuple))
        if plain and value == default and not _accepts(convert, argument.name, position):
            # A mapping need not have a parameter for an argument that stays at its default.
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Bound(convert, args, kwargs | mappings.facts(node), own=mappings.find(name) is None)


def _accepts(convert: Convert, name: str, position: int) -> bool:
    parameters = list(inspect.signature(convert).parameters.values())
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
        return True
    return any(p.name == name for p in parameters) or sum(p.kind is not p.KEYWORD_ONLY for p in parameters) > position


def _replace(graph: Graph, node: Node, bound: Bound, mapped: Mapped) -> None:
    inputs = list(dict.fromkeys(node.all_input_nodes))
    call = _Call(op_name(node.target), bound, inputs, value_of(node), mapped)
    users = list(node.users)
    takes = [user for user in users if user.target is operator.getitem]
    several = isinstance(value_of(node), (list, tuple))
    if several and len(takes) != len(users):
        raise OpMappingError(f"op_mappings: {call.name} returns several tensors, which the graph uses as one.")
    taken: list[tuple[Node, Any]] = [(user, user.args[1]) for user in takes] if several else [(node, 0)]
    for old, index in taken:
        name = f"torchserve_openvino.mapped_{len(mapped.translators)}.default"
        with graph.inserting_before(old):
            new = call_translator(graph, name, inputs)
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        mapped.translators.append((name, call.output(index)))
    if several:
        graph.erase_node(node)


class _Call:
    """One mapped node: calls the mapping once, and serves all its outputs from that call."""

    def __init__(self, name: str, bound: Bound, inputs: list[Node], value: Any, mapped: Mapped) -> None:
        self.name = name
        self._bound = bound
        self._inputs = inputs
        self._expected = tensors_of(value) or [value]
        self._mapped = mapped
        self._outputs: list[ov.Output | None] | None = None

    def output(self, index: int) -> Translator:
        def translate(context: Any) -> list[Any]:
            try:
                if self._outputs is None:
                    operands = dict(
                        zip(self._inputs, (context.get_input(i) for i in range(len(self._inputs))), strict=True)
                    )
                    self._outputs = self._convert(operands)
                output = self._outputs[index]
                if output is None:
                    raise OpMappingError(f"op_mappings: the mapping of {self.name} has no output {index}.")
                return [output]
            except Exception as error:
                self._mapped.failed_op, self._mapped.error = self.name, error
                raise

        return translate

    def _convert(self, operands: dict[Node, Any]) -> list[ov.Output | None]:
        args = torch.fx.node.map_arg(tuple(self._bound.args), operands.__getitem__)
        kwargs = torch.fx.node.map_arg(dict(self._bound.kwargs), operands.__getitem__)
        try:
            result = self._bound.convert(*args, **kwargs)
        except Exception as error:
            if self._bound.own and any(value.get_partial_shape().is_dynamic for value in operands.values()):
                raise OpMappingError(
                    f"{self.name} is converted only where its sizes are known while the graph compiles"
                ) from error
            raise OpMappingError(
                f"op_mappings: the mapping of {self.name} fails: {type(error).__name__}: {error}"
            ) from error
        several = result if isinstance(result, (tuple, list)) else [result]
        # None stands for an unused output.
        outputs = [None if each is None and len(several) > 1 else _output(self.name, each) for each in several]
        if len(outputs) != len(self._expected):
            raise OpMappingError(
                f"op_mappings: the mapping of {self.name} returns {len(outputs)} output(s), but the operator "
                f"has {len(self._expected)}."
            )
        for i, (output, expected) in enumerate(zip(outputs, self._expected, strict=True)):
            if output is not None:
                _check(f"output {i} of the mapping of {self.name}", output, expected)
        return outputs


def _output(name: str, value: Any) -> ov.Output:
    if isinstance(value, ov.Output):
        return value
    if isinstance(value, ov.Node) and value.get_output_size() == 1:
        return value.output(0)
    raise OpMappingError(
        f"op_mappings: the mapping of {name} returns a value of type {type(value).__name__}; it must return OpenVINO "
        "nodes or outputs."
    )


def _check(what: str, output: ov.Output, expected: Any) -> None:
    spec = spec_of(expected)
    if output.get_element_type() not in {spec.ov_type, ov.Type.dynamic}:
        raise OpMappingError(
            f"op_mappings: {what} is {output.get_element_type().get_type_name()}, torch has {spec.dtype}; convert it."
        )
    if not output.get_partial_shape().compatible(ov.PartialShape(list(spec.shape))):
        raise OpMappingError(
            f"op_mappings: {what} has shape {output.get_partial_shape()}, torch has {list(spec.shape)}."
        )
