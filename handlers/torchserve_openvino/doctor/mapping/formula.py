"""Generates Python code that builds an operator from OpenVINO operations, based on its decomposition, and tests it.

The graph that torch traces for the operator is translated node by node. Floating-point arguments are traced with
unique values, so that they can be found in the graph and stay arguments; the other arguments are fixed to the values
seen, which the code checks. A formula is offered only where its answer on the values seen equals eager's.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import difference
from torchserve_openvino.backend.runtime.execute import wrap
from torchserve_openvino.backend.spec import OV_TYPES, ValueSpec
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.doctor.mapping.mapping_writer import BINARY, UNARY, MappingWriter, UnknownOpError, trace_op
from torchserve_openvino.doctor.target import SampleCall
from torchserve_openvino.ops import op_name

# Traced in place of the n-th floating-point argument: values that no formula contains by chance.
_SENTINELS = (0.7310585917, 1.3178921641, 2.6038749157, 0.1927463815)


@dataclass(frozen=True)
class Formula:
    """The body of a mapping.

    Attributes:
        lines: Python statements, the last one a return; `constant` and `ops` are in scope.
        origin: Where it comes from, for the comment above it.
        max_abs: Largest difference from eager on the values seen.
    """

    lines: list[str]
    origin: str
    max_abs: float


def formula_for(
    op: torch._ops.OpOverload,
    seen: SampleCall,
    parameters: Sequence[str],
    table: Mapping[Any, Any],
    implementation: Callable[..., Any] | None,
) -> Formula | None:
    """Generates a formula and tests it.

    Args:
        op: The operator.
        seen: A call of it that was recorded.
        parameters: The arguments of its schema, as the mapping names them.
        table: Decompositions to trace with.
        implementation: Its Python implementation, where there is one.

    Returns:
        The first formula that gives eager's answer; None where there is none.
    """
    bound = bind(op, seen)
    candidates: list[tuple[list[str], str]] = []
    packet = packet_name(op_name(op)).split(".")[1]
    tensors_only = all(isinstance(value, torch.Tensor) for value in bound.values())
    same = {1: UNARY, 2: BINARY}.get(len(bound), {}).get(packet) if tensors_only else None
    if same is not None:
        candidates.append(([f"return ops.{same}({', '.join(parameters)})"], "OpenVINO's operation of the same name"))
    for function, origin in ((op, "torch's decomposition"), (implementation, "the operator's own Python code")):
        lines = _traced_lines(function, bound, parameters, table) if function is not None else None
        if lines is not None:
            candidates.append((lines, origin))
    for lines, origin in candidates:
        worst = try_formula(lines, op, seen, parameters)
        if worst is not None:
            return Formula(lines, origin, worst)
    return None


def bind(op: torch._ops.OpOverload, seen: SampleCall) -> dict[str, Any]:
    """Returns the recorded arguments by the schema's names, including defaults."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(seen.args):
            bound[argument.name] = seen.args[position]
        else:
            bound[argument.name] = seen.kwargs.get(argument.name, argument.default_value)
    return bound


# --- the formula as source code -----------------------------------------------------------------------------------


def _traced_lines(
    function: Callable[..., Any], bound: Mapping[str, Any], parameters: Sequence[str], table: Mapping[Any, Any]
) -> list[str] | None:
    replaced: dict[str, float] = {}
    checked: list[str] = []
    for (name, value), parameter in zip(bound.items(), parameters, strict=True):
        if isinstance(value, float) and math.isfinite(value) and len(replaced) < len(_SENTINELS):
            replaced[name] = _SENTINELS[len(replaced)]
        elif value is not None and not _is_tensors(value):
            checked += [
                f"if {parameter} != {value!r}:",
                f'    raise NotImplementedError(f"written for {parameter}={value!r} only, not {{{parameter}}}")',
            ]
    graph = trace_op(function, *_call(function, {**bound, **replaced}), table)
    if graph is None:
        return None
    named = dict(zip(bound, parameters, strict=True))
    try:
        return (
            checked
            + MappingWriter(graph, bound, {value: named[name] for name, value in replaced.items()}, named).lines()
        )
    except UnknownOpError:
        return None


def _is_tensors(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _call(function: Callable[..., Any], bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits the arguments into positional ones and those that are keyword-only."""
    if isinstance(function, torch._ops.OpOverload):
        only = {argument.name for argument in function._schema.arguments if argument.kwarg_only}
    else:
        kinds = inspect.signature(function).parameters
        only = {name for name, parameter in kinds.items() if parameter.kind is parameter.KEYWORD_ONLY}
    args = tuple(value for name, value in bound.items() if name not in only)
    return args, {name: value for name, value in bound.items() if name in only}


# --- comparison with the operator ---------------------------------------------------------------------------------


def constant(value: Any, like: Any) -> Any:
    """Makes a scalar constant of another value's type, as the helper in the mapping file does."""
    return opset13.constant(value, dtype=like.get_element_type())


def try_formula(
    lines: Sequence[str], op: torch._ops.OpOverload, seen: SampleCall, parameters: Sequence[str]
) -> float | None:
    """Builds, compiles and runs a formula on the seen values.

    Returns:
        The largest difference from eager; None where it fails or differs by more than rounding.
    """
    scope: dict[str, Any] = {"ops": opset13, "constant": constant}
    body = "\n    ".join(lines)
    try:
        exec(f"def formula({', '.join(parameters)}):\n    {body}\n", scope)
        inputs: list[torch.Tensor] = []
        nodes: list[Any] = []

        def as_node(value: torch.Tensor) -> Any:
            inputs.append(value.contiguous())
            nodes.append(opset13.parameter(list(value.shape), OV_TYPES[value.dtype]))
            return nodes[-1].output(0)

        values = pytree.tree_map_only(torch.Tensor, as_node, list(bind(op, seen).values()))
        output = scope["formula"](*values)
        results = [result.output(0) if isinstance(result, ov.Node) else result for result in _listed(output)]
        compiled = core().compile_model(ov.Model(results, nodes), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        specs = [ValueSpec(dtype=tensor.dtype, shape=tuple(tensor.shape)) for tensor in inputs]
        answers = compiled([wrap(tensor, spec) for tensor, spec in zip(inputs, specs, strict=True)])
        got = [torch.from_numpy(np.array(answers[i])) for i in range(len(results))]
        expected = _listed(op(*seen.args, **seen.kwargs))
    except Exception:
        # Generated code may fail in any way; then the user gets the skeleton without a formula.
        return None
    if difference(got, expected, "f32"):
        return None
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True) if a.numel()]
    return max((float((a - b).abs().nan_to_num(0.0).max()) for a, b in pairs), default=0.0)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
