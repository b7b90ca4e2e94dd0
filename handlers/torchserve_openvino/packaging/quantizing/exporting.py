"""Exports a model with batch sizes left open, and quantizes it with NNCF."""

import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from torchserve_openvino.config.sections.quantize import QuantizeSection
from torchserve_openvino.errors import PackagingError, class_and_line
from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.packaging.quantizing.samples import CalibrationSample, distinct_shapes
from torchserve_openvino.serving.shapes.input_spec import Inputs

_GROUPS = (64, 32, 16)
_ATTENTION = {torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.softmax.int}


def exported(model: nn.Module, samples: Sequence[CalibrationSample]) -> tuple[torch.export.ExportedProgram, Inputs]:
    """Exports a model.

    Args:
        model: In eager PyTorch, and in evaluation mode.
        samples: What it is called with; sizes in which these differ are left open, as is the batch.

    Returns:
        The program, and the inputs that it was exported with, of two items.

    Raises:
        PackagingError: torch.export can't express the model.
    """
    shapes = [_shapes(sample.inputs) for sample in distinct_shapes(samples)]
    inputs = _doubled(samples[0].inputs)
    dynamic_axis = torch.export.Dim.DYNAMIC
    open_axes = [
        {0: dynamic_axis}
        | {axis: dynamic_axis for axis in range(1, len(first)) if len({shape[position][axis] for shape in shapes}) > 1}
        for position, first in enumerate(shapes[0])
    ]
    leaves, spec = pytree.tree_flatten(inputs)
    which = iter(open_axes)
    dynamic = pytree.tree_unflatten([next(which) if isinstance(leaf, torch.Tensor) else None for leaf in leaves], spec)
    args, kwargs = dynamic
    names = [*_positional(model, len(args))]
    try:
        with torch.no_grad():
            program = torch.export.export(
                model, *inputs, dynamic_shapes={**dict(zip(names, args, strict=True)), **kwargs}, strict=False
            )
    except Exception as error:
        raise PackagingError(
            f"torch.export can't express the model, so it can't be quantized: {class_and_line(error)}"
        ) from error
    return program, inputs


def _positional(model: nn.Module, count: int) -> list[str]:
    return list(inspect.signature(model.forward).parameters)[:count]


def _shapes(inputs: Inputs) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _doubled(inputs: Inputs) -> Inputs:
    """Returns zeros for a batch of two: torch.export takes a size of 1 for a constant, and stores what it was given."""
    doubled: Inputs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: torch.zeros_like(torch.cat([tensor, tensor])), inputs
    )
    return doubled


def quantized(
    program: torch.export.ExportedProgram, section: QuantizeSection, samples: Sequence[CalibrationSample]
) -> Any:
    """Quantizes an exported program.

    Args:
        program: From `exported`.
        section: How.
        samples: For calibration.

    Returns:
        A GraphModule with the same inputs and outputs.

    Raises:
        PackagingError: NNCF is not installed, or refuses the model or an option.
    """
    try:
        import nncf
    except ImportError as error:
        raise PackagingError(
            f"--quantize needs nncf ({error}): pip install 'torchserve-openvino[quantize]'."
        ) from error
    nncf.set_log_level(logging.WARNING)
    module = tidied(program.module(check_guards=False))
    data = nncf.Dataset([sample.inputs for sample in samples], _called(module))
    names = _with_integers(module) if section.method == "int8" else []
    patterns, types = list(section.ignored.names), list(section.ignored.types)
    ignored = nncf.IgnoredScope(names=names, patterns=patterns, types=types, validate=False)
    try:
        if section.method == "int8":
            model_in_int8 = nncf.quantize(
                module, data, subset_size=len(samples), preset=nncf.QuantizationPreset(section.preset),
                fast_bias_correction=section.fast_bias_correction, ignored_scope=ignored,
                **_options(nncf, module, section),
            )  # fmt: skip
            return _with_small_tables(nncf, model_in_int8, patterns, types)
        if section.method == "int8_weights":
            return nncf.compress_weights(module, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=ignored)
        size = section.group_size if section.group_size is not None else _group_for(module)
        return nncf.compress_weights(
            module, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=size, ratio=1.0, dataset=data,
            ignored_scope=ignored, all_layers=True,
        )  # fmt: skip
    except Exception as error:
        # NNCF has errors of many classes; some are those of the model's own operators.
        raise PackagingError(f"NNCF can't quantize the model by {section.method}: {error}") from error


def _with_small_tables(nncf: Any, model: GraphModule, patterns: list[str], types: list[str]) -> Any:
    """Puts the tables of embeddings, which `nncf.quantize` leaves in f32, into 8 bits."""
    nodes = [node for node in model.graph.nodes if node.op == "call_function"]
    others = [node.name for node in nodes if node.target is not torch.ops.aten.embedding.default]
    if len(others) == len(nodes):
        return model
    ignored = nncf.IgnoredScope(names=others, patterns=patterns, types=types, validate=False)
    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=ignored)


def _options(nncf: Any, module: GraphModule, section: QuantizeSection) -> dict[str, Any]:
    """Returns options for transformers, whose activations have outliers."""
    if not any(node.target in _ATTENTION for node in module.graph.nodes):
        return {}
    share = section.smooth_quant if section.smooth_quant is not None else -1
    alphas = nncf.AdvancedSmoothQuantParameters(matmul=share)
    return {
        "model_type": nncf.ModelType.TRANSFORMER,
        "advanced_parameters": nncf.AdvancedQuantizationParameters(smooth_quant_alphas=alphas),
    }


def _with_integers(module: GraphModule) -> list[str]:
    """Returns the nodes that take integers or truth values: NNCF would quantize these, too."""

    def is_float(node: Node) -> bool:
        return all(tensor.is_floating_point() for tensor in tensors_of(value_of(node)))

    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node.name for node in nodes if not all(map(is_float, node.all_input_nodes))]


def _called(module: nn.Module) -> Any:
    """NNCF calls a model with one value, or with a dictionary; so inputs are given as they are flattened."""

    def flat(inputs: Inputs) -> Any:
        args, kwargs = inputs
        if kwargs and not args:
            return dict(kwargs)
        return args[0] if len(args) == 1 and not kwargs else (*args, *kwargs.values())

    return flat


def _group_for(module: GraphModule) -> int:
    rows = [p.shape[1] for name, p in module.named_parameters() if p.dim() == 2 and re.search("weight", name)]
    return next((size for size in _GROUPS if rows and all(row % size == 0 for row in rows)), -1)


# --- a graph that NNCF 3.4 takes: it counts sizes among the inputs of an operator, and confuses them with tensors ---
# Views whose sizes depend on those of the input become operators that need none, and keyword arguments become
# positional. Computations that nothing uses go.


aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def tidied(model: GraphModule) -> GraphModule:
    """Changes a graph in place, and returns it."""
    for node in list(model.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        _make_positional(node, node.target)
        if node.target in _VIEWS:
            _make_sizeless(node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _make_positional(node: Node, operator: torch._ops.OpOverload) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    for position, argument in enumerate(operator._schema.arguments[: len(names)]):
        if position >= len(args) and not kwargs.keys().isdisjoint(names[position:]):
            args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def _make_sizeless(node: Node) -> None:
    """Turns a view that splits one axis, or joins adjacent ones, into one that says only this."""
    source = node.args[0]
    if not isinstance(source, Node) or not any(isinstance(size, Node) for size in node.args[1]):  # type: ignore[union-attr]
        return
    before, after = list(value_of(source).shape), list(value_of(node).shape)
    first = _common(before, after)
    if first == len(before) == len(after):
        node.replace_all_uses_with(source)
        return
    last = _common(before[first:][::-1], after[first:][::-1])
    if first and first + last in {len(before), len(after)}:
        # Only axes of size 1 come or go: together with the one before them.
        first -= 1
    split, joined = after[first : len(after) - last], before[first : len(before) - last]
    if len(joined) == 1 and sum(not isinstance(size, int) for size in split) <= 1:
        sizes = [size if isinstance(size, int) else -1 for size in split]
        node.target, node.args = aten.unflatten.int, (source, first, sizes)
    elif len(split) == 1 and joined:
        node.target, node.args = aten.flatten.using_ints, (source, first, first + len(joined) - 1)


def _common(a: list[Any], b: list[Any]) -> int:
    """Returns how many sizes at the beginning are the same."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if str(x) != str(y):
            break
        count += 1
    return count
