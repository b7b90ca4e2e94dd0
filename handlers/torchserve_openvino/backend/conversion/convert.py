"""Third stage: converts one FX subgraph to one ov.Model, with the weights as constants."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch.fx import Graph, GraphModule, Node

from torchserve_openvino.backend.conversion.convert_ts import convert_traced, named_by_torchscript
from torchserve_openvino.backend.conversion.mapped_ops import Mapped, replace_mapped
from torchserve_openvino.backend.partitioning.partition import Subgraph
from torchserve_openvino.backend.spec import Interface, SizeLimits, ValueSpec, checked_spec, spec_of
from torchserve_openvino.backend.upstream._openvino_private import fx_to_model
from torchserve_openvino.backend.upstream._torch_private import compile_lock
from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.ops.mappings import Mappings
from torchserve_openvino.ops.names import op_name, value_of
from torchserve_openvino.passes.fx.weight_integers import UnfoldedError
from torchserve_openvino.passes.lists import FX_PASSES, OV_PASSES
from torchserve_openvino.passes.manager import PassError, run_passes
from torchserve_openvino.passes.pass_context import Compile, PassContext

_OP_NAME = re.compile(r"\b([A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*)\b")


class ConversionError(RuntimeError):
    """A subgraph that OpenVINO's frontend could not convert.

    Attributes:
        ops: Operators of the subgraph that the message names; empty if it names none.
    """

    def __init__(self, message: str, ops: frozenset[str]) -> None:
        self.ops = ops
        super().__init__(message)


@dataclass
class Converted:
    """An ov.Model and its calling interface.

    Attributes:
        keep_alive: Owners of the memory that the model's constants share.
    """

    model: ov.Model
    interface: Interface
    keep_alive: Any
    seconds: float


def convert(
    part: Subgraph, constants: Mapping[int, torch.Tensor], mappings: Mappings, converter: str, compile: Compile
) -> Converted:
    """Converts one part of a graph.

    Args:
        part: The subgraph.
        constants: Maps an argument position to the real tensor that becomes a constant.
        mappings: Operators and modules that the user's functions convert.
        converter: ``fx``, or ``ts`` to convert through TorchScript.
        compile: Compiles what is computed while converting.

    Raises:
        ConversionError: The conversion failed; carries the frontend's own message.
    """
    start = time.perf_counter()
    mapped = Mapped()
    # Operators on fake tensors set process-wide flags that Dynamo reads, so no other thread may trace meanwhile.
    with compile_lock:
        try:
            graph, context = _copy(part, constants, compile)
            names = [node.name for node in graph.find_nodes(op="placeholder")]
            run_passes(FX_PASSES, "partition", graph, context)
            interface = _interface(part, names, context)
            # GraphModule needs every attribute that the graph names; a tensor stays a tensor.
            module = GraphModule(context.tensors, graph)
            if converter == "ts":
                _refuse_mapped(part, mappings)
                model, decoder = convert_traced(module, mappings.libraries)
            else:
                weights = frozenset(node.name for node in graph.find_nodes(op="get_attr"))
                mapped = replace_mapped(module.graph, mappings, weights)
                model, decoder = _convert_fx(module, interface, mapped, mappings)
            _fit_inputs(model, interface.inputs)
            _fit_outputs(model, (*interface.outputs, *checked_spec(interface.checks)))
            run_passes(OV_PASSES, "model", model, context)
        except Exception as error:
            # OpenVINO raises RuntimeError, its Python decoder any error; either way these nodes run in eager PyTorch.
            raise _conversion_error(error, part, mapped, converter) from (mapped.error or error)
    return Converted(model, interface, (decoder, module), time.perf_counter() - start)


def _copy(
    part: Subgraph, constants: Mapping[int, torch.Tensor], compile: Compile
) -> tuple[torch.fx.Graph, PassContext]:
    """Returns a copy of a part's graph, and what passes need to change it."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(part.graph.graph, {}))
    targets = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    tensors = {target: getattr(part.graph, target) for target in targets}
    return graph, PassContext(constants=constants, tensors=tensors, compile=compile)


def _interface(part: Subgraph, names: Sequence[str], context: PassContext) -> Interface:
    """Returns how the part is called.

    Args:
        part: The subgraph.
        names: Names of its placeholders, as the limits have them.
        context: The result of the passes.
    """
    runtime = tuple(i for i in range(len(part.arguments)) if i not in context.constants)
    inputs = tuple(spec_of(value_of(part.arguments[i])) for i in runtime)
    nodes, order = part.output_nodes(), context.order
    limited = [
        (position, names[i])
        for position, (i, spec) in enumerate(zip(runtime, inputs, strict=True))
        if not spec.is_scalar_int
    ]
    return Interface(
        runtime=runtime,
        inputs=inputs,
        outputs=tuple(spec_of(value_of(nodes[order.index(i)])) for i in range(max(order) + 1)),
        arguments=len(part.arguments),
        constant_bytes=sum(tensor.nbytes for tensor in context.constants.values()),
        limits=tuple(
            SizeLimits(size, tuple((position, values[name]) for position, name in limited if name in values))
            for size, values in context.limits
        ),
        order=order,
        checks=context.checks,
    )


def _convert_fx(module: GraphModule, interface: Interface, mapped: Mapped, mappings: Mappings) -> tuple[ov.Model, Any]:
    """Converts a graph through OpenVINO's FX decoder; returns the model, and what must live as long as it."""
    shapes, dtypes = [spec.shape for spec in interface.inputs], [spec.dtype for spec in interface.inputs]
    model, decoder = fx_to_model(module, shapes, dtypes, mapped.translators, mappings.libraries)
    refuse_other_results(model, module.graph)
    return _with_all_inputs(model, module.graph), decoder


def _conversion_error(error: Exception, part: Subgraph, mapped: Mapped, converter: str) -> ConversionError:
    """Returns the error with the operators that it names."""
    if mapped.error is not None:
        return ConversionError(str(mapped.error), frozenset({mapped.failed_op}))
    if isinstance(error, UnfoldedError):
        return ConversionError(str(error), frozenset({error.op}))
    message = str(error) if isinstance(error, (OpMappingError, PassError)) else f"{type(error).__name__}: {error}"
    named = frozenset(_OP_NAME.findall(message)) & part.op_counts.keys()
    if converter == "ts":
        named |= named_by_torchscript(message, part.op_counts)
    return ConversionError(message, named)


def _refuse_mapped(part: Subgraph, mappings: Mappings) -> None:
    """Raises if the part has operators that the user mapped: TorchScript's tracer can't call the mappings."""
    mapped = frozenset(name for name in part.op_counts if mappings.covers(name))
    if mapped:
        message = f"{', '.join(sorted(mapped))}: op_mappings have no effect with the backend openvino_ts"
        raise OpMappingError(message)


def _with_all_inputs(model: ov.Model, graph: torch.fx.Graph) -> ov.Model:
    """Adds the inputs of which no result depends on the values: the frontend drops them.

    Such are a tensor that a slice of all of it overwrites, and one of which only the sizes count.
    """
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    parameters = {port.get_any_name(): port.get_node() for port in model.inputs}
    if len(parameters) == len(names) or not parameters.keys() <= set(names):
        return model
    for name in set(names) - parameters.keys():
        parameters[name] = ops.parameter([-1], np.float32)
        parameters[name].output(0).set_names({name})
    in_order = [parameters[name] for name in names]
    return ov.Model(model.get_results(), model.get_sinks(), in_order, model.get_friendly_name())


def _fit_inputs(model: ov.Model, specs: Sequence[ValueSpec]) -> None:
    if len(model.inputs) != len(specs):
        raise RuntimeError(f"the converted model has {len(model.inputs)} inputs, the graph {len(specs)}")
    for port, spec in zip(model.inputs, specs, strict=True):
        port.get_node().set_element_type(spec.ov_type)
        port.get_node().set_partial_shape(ov.PartialShape(list(spec.shape)))
    model.validate_nodes_and_infer_types()


def _fit_outputs(model: ov.Model, specs: Sequence[ValueSpec]) -> None:
    """Converts each output to eager's dtype, and raises if its shape contradicts eager's."""
    if len(model.outputs) != len(specs):
        raise RuntimeError(f"the converted model has {len(model.outputs)} outputs, the graph {len(specs)}")
    for result, spec in zip(model.get_results(), specs, strict=True):
        source = result.input_value(0)
        shape = source.get_partial_shape()
        expected = ov.PartialShape(list(spec.shape))
        if not shape.compatible(expected):
            raise RuntimeError(f"OpenVINO infers shape {shape} where torch has {expected}")
        if source.get_element_type() != spec.ov_type:
            result.input(0).replace_source_output(ops.convert(source, spec.ov_type).output(0))
    model.validate_nodes_and_infer_types()


# --- checks that the frontend gave each operator's result the element type and shape that torch gave it -----------
# Output types that differ are converted (`convert._fit_outputs`), but intermediate results are not: the frontend once
# left a cumulative sum of booleans boolean, so that its square became a logical "and"; and it once let a squeeze remove
# a dimension of symbolic size, so that a later operator wrote along the wrong dimension.


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


def refuse_other_results(model: ov.Model, graph: Graph) -> None:
    """Compares each operator's result, where another operator takes it, with torch's.

    Args:
        model: The frontend's conversion of ``graph``; it names the operations of a node ``node/operator/...``.
        graph: The converted graph, with fake values.

    Raises:
        RuntimeError: A type or shape differs; the message names the operator.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    operations = model.get_ordered_ops()
    converted = {name for name, operator in map(_origin, operations) if operator}
    takes = {name: _takes(node, converted) for name, node in nodes.items()}
    for operation in operations:
        name, operator = _origin(operation)
        node = nodes.get(name)
        if node is None or not operator or not isinstance(value_of(node), torch.Tensor):
            continue
        specs = [spec_of(value) for value in _values(node)]
        for output in operation.outputs():
            users = {_origin(port.get_node())[0] for port in output.get_target_inputs()}
            # The frontend merges two slices that are written to into one operation; parts of each then serve the other.
            if not any(user not in takes or node in takes[user] for user in users - {name}):
                continue
            differences = [_difference(output, spec) for spec in specs]
            if all(differences):
                difference = differences[0]
                raise RuntimeError(f"{op_name(node.target)} becomes {difference} in torch")


def _values(node: Node) -> list[torch.Tensor]:
    """Returns the fake values that a node's operation may have.

    The frontend drops views before and after a softmax that cancel out, and computes it in the shape between them.
    """
    values: list[torch.Tensor] = [value_of(node)]
    if node.target is torch.ops.aten._softmax.default:
        values += [value_of(user) for user in node.users if user.target in _VIEWS]
    return values


def _origin(operation: ov.Node) -> tuple[str, str]:
    """Returns the name of the node that an operation comes from, and the rest of its name: empty if from no node."""
    name, _, rest = operation.get_friendly_name().partition("/")
    return name, rest


def _takes(node: Node, converted: set[str]) -> set[Node]:
    """Returns the nodes whose results a node takes, looking through nodes that have no operation in OpenVINO."""
    sources: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source not in sources:
            sources.add(source)
            waiting += source.all_input_nodes if source.name not in converted else []
    return sources


def _difference(output: ov.Output, spec: ValueSpec) -> str:
    if output.get_element_type() != spec.ov_type:
        return f"{output.get_element_type()} in OpenVINO, {spec.ov_type}"
    if not output.get_partial_shape().compatible(ov.PartialShape(list(spec.shape))):
        return f"{output.get_partial_shape()} in OpenVINO, {list(spec.shape)}"
    return ""
