"""Deliberate faults of this package: each is injected while a program runs, to check that the fuzzer finds it.

To add one, name the attributes that it replaces and their replacements. The report keeps the table's order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import openvino as ov
import torch
from openvino import opset15 as ops

from fuzzing.model_faults import (
    add_row_to_scores,
    before_compiling,
    bound_pools,
    clear_closed_rows,
    select_behind_products,
)

_PACKAGE = "torchserve_openvino"
# Maps an attribute's original value to its replacement.
Replacement = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        says: What goes wrong.
        changes: Pairs of an attribute, ``module:path`` in the package, and its replacement.
        mode: The mode that shows it, in the syntax of ``--mode``; all programs run in it.
    """

    says: str
    changes: tuple[tuple[str, Replacement], ...]
    mode: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Injects the fault."""
        with ExitStack() as stack:
            for path, replacement in self.changes:
                module_name, _, attribute = path.partition(":")
                parts = attribute.split(".")
                owner: Any = importlib.import_module(f"{_PACKAGE}.{module_name}")
                for part in parts[:-1]:
                    owner = getattr(owner, part)
                new = replacement(getattr(owner, parts[-1]))
                stack.enter_context(mock.patch.object(owner, parts[-1], new))
            yield


def _does(answer: Any) -> Replacement:
    """A replacement that does nothing but return ``answer``."""
    return lambda _: lambda *args, **kwargs: answer


def _same_memory(new: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    kept: dict[Any, torch.Tensor] = {}

    def reuse(self: Any, spec: Any) -> torch.Tensor:
        return kept.setdefault((id(self), spec), new(self, spec))

    return reuse


def _captured_in_parts(_: Any) -> Callable[..., Any]:
    def capture(
        model: Callable[..., Any], backend: Callable[..., Any], observer: Any, around: Any, **limits: Any
    ) -> Any:
        from torchserve_openvino.backend.upstream import _torch_private

        compiled = torch.compile(model, backend=backend, **limits)
        _torch_private.watch_frames(compiled, observer, around=around)
        return compiled

    return capture


def _unobserved(self: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _as_it_is(_: Any) -> Callable[[ov.Output], ov.Node]:
    """Puts back what a repair would replace, by an operator that does nothing."""
    return lambda result: ops.maximum(result, result)


def _without_pass(name: str) -> Replacement:
    def without(passes: Any) -> Any:
        rest = tuple(pass_ for pass_ in passes if pass_.name != name)
        if len(rest) == len(passes):
            raise LookupError(f"there is no pass {name}")
        return rest

    return without


def _without_tracing(name: str) -> Replacement:
    return lambda rule_of: lambda of: replace(rule_of(of), traced=None) if of == name else rule_of(of)


MUTANTS: dict[str, Mutant] = {
    "output_is_input": Mutant(
        "an output that is an input is written to directly: nobody writes it",
        (("backend.runtime.execute:computed_outputs", lambda _: lambda compiled: [True] * len(compiled.outputs)),),
    ),
    "closed_rows": Mutant(
        "attention rows whose mask forbids everything are NaN",
        (("passes.fx.closed_rows:_zero_closed_rows", _does(None)),),
    ),
    "selected_rows": Mutant(
        "what is computed for one row alone, that a model takes, is computed for another one",
        (
            (
                "passes.fx.selected_rows:_slice",
                lambda real: lambda graph, source, dim, index: real(graph, source, dim, 0 if index else 1),
            ),
        ),
        mode="real_sizes,static,f32",
    ),
    "negative_second_index": Mutant(
        "a negative value in the second index tensor is taken as it is",
        (("passes.fx.negative_indices:_count_from_start", _does(None)),),
    ),
    "views_contiguous": Mutant(
        "a strided view that is returned is taken for contiguous",
        (("backend.partitioning.partition:hand_out_views", _does(None)),),
    ),
    "dynamic_shape": Mutant(
        "a wrong shape of a dynamic answer is neither avoided nor noticed",
        (
            ("passes.fx.reduced_dimensions:_keep_reduced_dimensions", _does(None)),
            ("backend.spec:SymbolicSizes.check", _does(None)),
        ),
        mode="dynamic",
    ),
    "shared_output_memory": Mutant(
        "an answer is overwritten by the next call",
        (("backend.runtime.output_memory:OutputMemory.new", _same_memory),),
        mode="static",
    ),
    "weights_unwatched": Mutant(
        "a changed weight is not noticed", (("backend.capture.graph:_holds", _does(True)),), mode="guarded"
    ),
    "freeze_unproven": Mutant(
        "a frozen call is proven by two calls that look alike, whatever Python did with values in between",
        (
            ("backend.capture.whole:capture_whole", _captured_in_parts),
            ("backend.capture.graph:reads_values", _does("")),
        ),
        mode="frozen",
    ),
    "integers_unchecked": Mutant(
        "integer inputs beyond what OpenVINO computes exactly are let through",
        (("backend.runtime.execute:_check_integers", _does(None)),),
    ),
    "checks_unread": Mutant(
        "what the graph says of its computed values is not read",
        (("backend.runtime.execute:_check_values", _does(None)),),
    ),
    "layout_lost": Mutant(
        "answers are contiguous where eager's are not",
        (("backend.runtime.execute:laid_out_copy", lambda _: lambda tensor, layout: tensor),),
    ),
    "eager_uncounted": Mutant(
        "frames that Dynamo gives up run in eager, and nobody counts them",
        (
            ("backend.capture.frame_log:FrameLog._count_eager_call", _does(None)),
            ("backend.capture.frame_log:FrameLog.lost", _does(None)),
            (
                "backend.capture.frame_log:FrameLog._observed",
                lambda _: lambda self, call, args, kwargs: call(*args, **kwargs),
            ),
        ),
        mode="guarded",
    ),
    "packed_once": Mutant(
        "weights that are used as they are and transposed are packed once",
        (("backend.conversion.convert:OV_PASSES", _without_pass("keep_orientations_apart")),),
    ),
    "chains_fused": Mutant(
        "OpenVINO fuses elementwise operators next to a chain that it fused before: the process ends",
        (("backend.runtime.build:crashes_plugin", _does("")),),
    ),
    "reductions_joined": Mutant(
        "OpenVINO computes what stands behind a reduction in its kernel, at other channels",
        (("passes.ov.kernel_fusions:_is_joined_reduction", _does(False)),),
    ),
    "scalars_reshaped": Mutant(
        "a matrix product is reshaped to a scalar: the process ends",
        (("passes.ov.kernel_fusions:_squeeze", _does(None)),),
    ),
    "copy_unwritten": Mutant(
        "what copy_ writes stays memory that nobody wrote",
        (("backend.conversion.convert_ts:rule_of", _without_tracing("aten.copy.default")),),
        mode="openvino_ts",
    ),
    "attention_fused": Mutant(
        "OpenVINO fuses attention and what clears its closed rows, wrongly for heads of 128 and more",
        (("backend.runtime.build:crashes_plugin", before_compiling(clear_closed_rows)),),
        mode="real_sizes,static,f32",
    ),
    "value_heads_fused": Mutant(
        "OpenVINO fuses hand-written attention and a choice of its rows, wrongly for value heads of 128 and more",
        (("backend.runtime.build:crashes_plugin", before_compiling(select_behind_products)),),
        mode="real_sizes,static,f32",
    ),
    "one_query_in_bf16": Mutant(
        "OpenVINO fuses a mask of one row and attention of one query in bf16: NaN",
        (("backend.runtime.build:crashes_plugin", before_compiling(add_row_to_scores)),),
        mode="real_sizes,static,bf16",
    ),
    "pools_bounded": Mutant(
        "a pool over nothing but -inf is the lowest number",
        (("backend.runtime.build:crashes_plugin", before_compiling(bound_pools)),),
        mode="real_sizes",
    ),
    "running_sums_at_once": Mutant(
        "running sums of many values are added up in float32, one by one",
        (("passes.ov.long_reductions:_running_sum", _as_it_is),),
        mode="real_sizes,f32",
    ),
    "long_sums_at_once": Mutant(
        "sums, means and variances of many values are added up in few float32 accumulators",
        (("backend.conversion.convert:OV_PASSES", _without_pass("keep_digits_of_sums")),),
        mode="real_sizes,f32",
    ),
    "kernels_as_they_are": Mutant(
        "convolutions whose rows of weights fill oneDNN's blocks, or whose result has one column, are wrong in bf16",
        (("backend.conversion.convert:OV_PASSES", _without_pass("widen_kernels")),),
        mode="real_sizes,static,bf16",
    ),
    "queries_as_heads": Mutant(
        "OpenVINO confuses the transpositions of as many queries as there are heads",
        (("passes.ov.attention_operands:_keep_exchanges_apart", _does(False)),),
        mode="real_sizes,static",
    ),
    "least_mask": Mutant(
        "the least float32, with which masks are filled, is minus infinity in bf16",
        (("backend.runtime.build:OV_PASSES", _without_pass("keep_masks_finite")),),
        mode="real_sizes,bf16",
    ),
}
