"""Checks of torch itself before a difference counts: promised strides, torch's own tracing, NaN in eager.

Torch promises the strides of its meta functions, which determine the layout of every compiled model's outputs. A few
of its CPU kernels use another order of dimensions than their meta functions (batch_norm, logsigmoid, an index with
permuted strides), so that a correct compiler differs from eager.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuzzing.program import Program
from fuzzing.values import arguments
from torchserve_openvino.backend.spec import OpenAxes
from torchserve_openvino.backend.upstream._torch_sizes import marking, open_ones
from torchserve_openvino.ops.memory_order import in_order, layout_of

# What is not a tensor has no memory order.
_ANY = object()


def promised_strides(module: torch.nn.Module, program: Program, letter: str) -> dict[str, tuple[int, ...]]:
    """Strides of each output of one call, by name; empty if torch can't infer them without values."""
    with_grad = program.mode.grad == "grad"
    args = arguments(program, letter, with_grad)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(with_grad):
            known: dict[int, torch.Tensor] = {}
            fakes = [known.setdefault(id(tensor), mode.from_tensor(tensor)) for tensor in args]
            leaves = pytree.tree_leaves(module(*fakes))
    except Exception:
        # The program may need values, which fake tensors do not have.
        return {}
    return {f"output {i}": tuple(leaf.stride()) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def traced(
    module: torch.nn.Module, dynamic: bool | None, open_axes: OpenAxes | None, way: str = "traced"
) -> Callable[..., Any]:
    """The module traced by Dynamo and AOTAutograd alone.

    Args:
        module: The module.
        dynamic: As in `torch.compile`.
        open_axes: Sizes that stay symbolic.
        way: ``decomposed`` also decomposes and removes dead code. ``laid_out`` gives results the memory order that was
            traced: where a size of 1 is like any other, torch's meta functions often cannot compare strides.
    """
    backend: Any = "aot_eager"
    if way == "decomposed":
        backend = aot_autograd(fw_compiler=_as_it_is, decompositions=core_aten_decompositions())
    elif way == "laid_out":
        backend = aot_autograd(fw_compiler=_laid_out)
    call = torch.compile(module, backend=backend, dynamic=dynamic)
    if open_axes is None:
        return call
    around = open_ones(nullcontext) if open_axes.ones else nullcontext

    def run(*args: Any) -> Any:
        with around():
            return call(*args)

    return marking(run, open_axes)


def _as_it_is(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return make_boxed_func(graph.forward)


def _laid_out(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    promised = [_layout(node) for node in graph.graph.output_node().args[0]]

    def run(*args: Any) -> Any:
        results = graph.forward(*args)
        return [
            value if layout is _ANY else in_order(value, layout)
            for value, layout in zip(results, promised, strict=True)
        ]

    return make_boxed_func(run)


def _layout(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return layout_of(value) if isinstance(value, torch.Tensor) else _ANY


def exported(module: torch.nn.Module) -> Callable[..., Any]:
    """The module run by torch.export alone, with one program for each set of shapes."""
    programs: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def call(*args: torch.Tensor) -> Any:
        shapes = tuple(tensor.shape for tensor in args)
        if shapes not in programs:
            programs[shapes] = torch.export.export(module, args, strict=False).module(check_guards=False)
        return programs[shapes](*args)

    return call


class LooksForNaN(TorchDispatchMode):
    """Detects NaN in operators' results.

    Attributes:
        found: Whether a result had NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            # Uninitialized memory may hold anything.
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and "empty" not in str(func):
                self.found |= bool(leaf.isnan().any())
        return result
