"""What passes read and write besides the graph itself."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import openvino as ov
import torch
from torch import fx

from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.ops.value_range import ValueRanges

# --- the values that an input of a partition may hold. Light to import: a worker that starts warm reads them ------


class Bounds(NamedTuple):
    """The values that an integer input may hold.

    Attributes:
        op: The operator that sets the bounds; empty if the type's range or indexing does.
        first: The value that the first element must have; None if any is allowed.
        last: The same for the last element.
    """

    low: int
    high: int
    op: str = ""
    first: int | None = None
    last: int | None = None


class IntegerLimits(NamedTuple):
    """Limits that keep a subgraph's integers exact at symbolic sizes up to one.

    Attributes:
        size: The largest symbolic size for which they are exact, and sums keep their digits.
        values: Bounds of each int64 or int32 input, and of each float that is cast to one, by node name; no entry if
            any value is allowed.
    """

    size: int
    values: dict[str, Bounds]


# --- what passes read and write besides the graph itself ----------------------------------------------------------


# Compiles a model for a device, with these properties and no others.
Compile = Callable[[ov.Model, str, Mapping[str, Any]], ov.CompiledModel]


def compile_directly(model: ov.Model, device: str, properties: Mapping[str, Any]) -> ov.CompiledModel:
    """Compiles a model, without a journal of compilations that end the process."""
    return core().compile_model(model, device, dict(properties))


@dataclass
class PassContext:
    """The data of one graph's way through the passes. Each stage needs only some of them.

    Attributes:
        static: Positions of the inputs of a lowered graph that are weights.
        constants: Weights of a partition by the position of their placeholder.
        tensors: Values of a graph's ``get_attr`` nodes by target; a pass that adds such a node adds its value.
        compile: Compiles what a pass computes.
        config: Properties for ``compile_model``.
        limits: Limits of a partition's inputs, for growing symbolic sizes; set by `limit_inputs`.
        ranges: Ranges of a partition's integers; set by `derive_ranges`.
        order: For each output of the partition, its position among the outputs of the graph; set by `drop_renames`.
        checks: A sentence for each element of the additional output; set by `add_checks`.
        products: As in `PartitionRecord`; set by `multiply_in_bf16x3`.
        seconds: Run time of each pass by its name.
    """

    static: Collection[int] = ()
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    compile: Compile = compile_directly
    config: Mapping[str, Any] = field(default_factory=dict)
    limits: Sequence[IntegerLimits] = ()
    ranges: ValueRanges | None = None
    order: tuple[int, ...] = ()
    checks: tuple[str, ...] = ()
    products: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


FxPass = Callable[[fx.Graph, PassContext], None]
OvPass = Callable[[ov.Model, PassContext], None]
