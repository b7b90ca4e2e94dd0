"""Third stage: converts one FX subgraph to one ov.Model, with the weights as constants."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch.fx import GraphModule

from torchserve_openvino.backend.conversion.convert_ts import convert_traced, named_by_torchscript
from torchserve_openvino.backend.conversion.mapped_ops import Mapped, replace_mapped
from torchserve_openvino.backend.conversion.passes.attention_operands import repeat_attention_operands
from torchserve_openvino.backend.conversion.passes.constant_parts import Compile, fold_constant_parts
from torchserve_openvino.backend.conversion.passes.convolution_kernels import widen_kernels
from torchserve_openvino.backend.conversion.passes.kernel_fusions import keep_kernels_apart
from torchserve_openvino.backend.conversion.passes.long_reductions import keep_digits_of_sums
from torchserve_openvino.backend.conversion.passes.low_bits import pack_weights
from torchserve_openvino.backend.conversion.passes.open_lengths import multiply_open_lengths
from torchserve_openvino.backend.conversion.passes.weight_packing import keep_orientations_apart
from torchserve_openvino.backend.conversion.passes.zero_signs import keep_signs_of_zero
from torchserve_openvino.backend.conversion.same_results import refuse_other_results
from torchserve_openvino.backend.lowering.checks import add_checks
from torchserve_openvino.backend.lowering.folding import fold_casts
from torchserve_openvino.backend.lowering.index_range import index_bounds
from torchserve_openvino.backend.lowering.int_range import Limits, input_limits
from torchserve_openvino.backend.lowering.masked_casts import mask_casts
from torchserve_openvino.backend.lowering.max_pools import keep_infinities
from torchserve_openvino.backend.lowering.rewrite import rewrite
from torchserve_openvino.backend.lowering.weight_integers import UnfoldedError, folded
from torchserve_openvino.backend.partitioning.partition import Part
from torchserve_openvino.backend.spec import Bounds, Interface, SizeLimits, ValueSpec, checked_spec, spec_of
from torchserve_openvino.backend.upstream._openvino_private import fx_to_model
from torchserve_openvino.backend.upstream._torch_private import compile_lock
from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.ops.mappings import Mappings
from torchserve_openvino.ops.names import RENAMES, op_name, value_of
from torchserve_openvino.ops.value_range import ValueRanges

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
    part: Part, constants: Mapping[int, torch.Tensor], mappings: Mappings, converter: str, compile: Compile
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
    # Operators on fake tensors set process-wide flags that Dynamo reads, so no other thread may trace meanwhile.
    with compile_lock:
        return _convert(part, constants, mappings, converter, compile)


def _convert(
    part: Part, constants: Mapping[int, torch.Tensor], mappings: Mappings, converter: str, compile: Compile
) -> Converted:
    start = time.perf_counter()
    mapped = Mapped()
    try:
        part = replace(part, graph=folded(part.graph, constants))
        placeholders = part.graph.graph.find_nodes(op="placeholder")
        runtime = tuple(i for i in range(len(part.arguments)) if i not in constants)
        inputs = tuple(spec_of(value_of(part.arguments[i])) for i in runtime)
        limits = _limits(part, constants)
        graph, order, weights, checks = _with_constants(part.graph, constants, limits)
        nodes = part.output_nodes()
        outputs = tuple(spec_of(value_of(nodes[order.index(i)])) for i in range(max(order) + 1))
        if converter == "ts":
            _refuse_mapped(part, mappings)
            model, decoder = convert_traced(graph, mappings.libraries)
        else:
            mapped = replace_mapped(graph.graph, mappings, weights)
            model, decoder = fx_to_model(
                graph,
                [spec.shape for spec in inputs],
                [spec.dtype for spec in inputs],
                mapped.translators,
                mappings.libraries,
            )
            refuse_other_results(model, graph.graph)
            model = _with_all_inputs(model, graph.graph)
        _fit_inputs(model, inputs)
        _fit_outputs(model, (*outputs, *checked_spec(checks)))
        pack_weights(model)
        multiply_open_lengths(model)
        keep_digits_of_sums(model)
        keep_signs_of_zero(model)
        keep_orientations_apart(model)
        keep_kernels_apart(model)
        widen_kernels(model)
        repeat_attention_operands(model)
        fold_constant_parts(model, compile)
    except Exception as error:
        # OpenVINO raises RuntimeError, its Python decoder any error; either way these nodes run in eager PyTorch.
        if mapped.error is not None:
            raise ConversionError(str(mapped.error), frozenset({mapped.failed_op})) from mapped.error
        message = str(error) if isinstance(error, OpMappingError) else f"{type(error).__name__}: {error}"
        if isinstance(error, UnfoldedError):
            raise ConversionError(str(error), frozenset({error.op})) from error
        named = frozenset(_OP_NAME.findall(message)) & part.op_counts.keys()
        if converter == "ts":
            named |= named_by_torchscript(message, part.op_counts)
        raise ConversionError(message, named) from error
    return Converted(
        model=model,
        interface=Interface(
            runtime=runtime,
            inputs=inputs,
            outputs=outputs,
            arguments=len(part.arguments),
            constant_bytes=sum(tensor.nbytes for tensor in constants.values()),
            limits=tuple(
                SizeLimits(
                    size,
                    tuple(
                        (position, values[placeholders[i].name])
                        for position, (i, spec) in enumerate(zip(runtime, inputs, strict=True))
                        if not spec.is_scalar_int and placeholders[i].name in values
                    ),
                )
                for size, values in limits
            ),
            order=order,
            checks=checks,
        ),
        keep_alive=(decoder, graph),
        seconds=time.perf_counter() - start,
    )


def _refuse_mapped(part: Part, mappings: Mappings) -> None:
    """Raises if the part has operators that the user mapped: TorchScript's tracer can't call the mappings."""
    mapped = frozenset(name for name in part.op_counts if mappings.covers(name))
    if mapped:
        message = f"{', '.join(sorted(mapped))}: op_mappings have no effect with the backend openvino_ts"
        raise OpMappingError(message)


def _limits(part: Part, constants: Mapping[int, torch.Tensor]) -> list[Limits]:
    """Returns the limits of integer values: what OpenVINO computes exactly, and, for indices, the size they index."""
    names = [node.name for node in part.graph.graph.find_nodes(op="placeholder")]
    indices = index_bounds(part.graph)
    tensors = {names[i]: tensor for i, tensor in constants.items()}
    return [
        Limits(
            size,
            indices | values | {name: _both(values[name], indices[name]) for name in values.keys() & indices.keys()},
        )
        for size, values in input_limits(part.graph, tensors, indices)
    ]


def _both(limit: Bounds, index: Bounds) -> Bounds:
    narrow = limit.low > index.low or limit.high < index.high
    return Bounds(max(limit.low, index.low), min(limit.high, index.high), limit.op if narrow else "", *index[3:])


def _with_constants(
    gm: GraphModule, constants: Mapping[int, torch.Tensor], limits: Sequence[Limits]
) -> tuple[GraphModule, tuple[int, ...], frozenset[str], tuple[str, ...]]:
    """Copies the graph for the frontend, with ``get_attr`` nodes in place of the ``constants`` placeholders.

    Returns:
        The copy, the output order from `_drop_renames`, the names of the constant nodes, and the sentences of
        `add_checks`.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    order = _drop_renames(graph)
    root: dict[str, Any] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if position not in constants:
            continue
        name = f"constant_{position}"
        root[name] = constants[position].detach()
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in root:
            root[str(node.target)] = getattr(gm, str(node.target))
    fold_casts(graph, root)
    mask_casts(graph)
    values = {node.name: root[str(node.target)] for node in graph.find_nodes(op="get_attr")}
    always = set[str].intersection(*(set(each.values) for each in limits))
    bounds = {name: [each.values[name] for each in limits] for name in always}
    widest = {name: (min(b.low for b in each), max(b.high for b in each)) for name, each in bounds.items()}
    ranges = ValueRanges(graph, widest, values)
    checks = add_checks(graph, ranges, limits[0].values)
    rewrite(graph, ranges)
    keep_infinities(graph)
    # GraphModule needs every attribute that the graph names; a tensor stays a tensor.
    return GraphModule(root, graph), order, frozenset(values), checks


def _drop_renames(graph: torch.fx.Graph) -> tuple[int, ...]:
    """Removes nodes that only rename a tensor, and then duplicate outputs: the frontend fails on both.

    Returns:
        For each former output, its position among the remaining outputs.
    """
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node.target) in RENAMES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    value = output.args[0]
    nodes = list(value) if isinstance(value, (list, tuple)) else [value]
    unique = list(dict.fromkeys(nodes))
    output.args = (tuple(unique),)
    return tuple(unique.index(node) for node in nodes)


def _with_all_inputs(model: ov.Model, graph: torch.fx.Graph) -> ov.Model:
    """Adds the inputs of which no result depends on the values: the frontend drops them.

    Such are a tensor that a slice of all of it overwrites, and one of which only the sizes count.
    """
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    given = {port.get_any_name(): port.get_node() for port in model.inputs}
    if len(given) == len(names) or not given.keys() <= set(names):
        return model
    for name in set(names) - given.keys():
        given[name] = ops.parameter([-1], np.float32)
        given[name].output(0).set_names({name})
    return ov.Model(model.get_results(), model.get_sinks(), [given[name] for name in names], model.get_friendly_name())


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
