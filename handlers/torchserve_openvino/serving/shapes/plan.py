"""Decides which batch sizes and lengths to compile, from the declared inputs and probes of eager PyTorch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection, WarmupInput
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading import files as loading
from torchserve_openvino.serving.modes import SERVING, Modes
from torchserve_openvino.serving.observation.observe import ObservedCall
from torchserve_openvino.serving.requests.batching import bucket_sizes
from torchserve_openvino.serving.shapes import probe
from torchserve_openvino.serving.shapes.input_spec import (
    Inputs,
    InputSpec,
    Signature,
    declared_specs,
    parameter_names,
    specs_of_sample,
)
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs
from torchserve_openvino.serving.shapes.probe import RowFacts, probe_rows
from torchserve_openvino.serving.shapes.value_sets import richest, sample_sets, value_sets
from torchserve_openvino.serving.shapes.warmup import Case, signatures

logger = logging.getLogger(__name__)

_BATCHES = (
    "set batchSize, handler.openvino.batching.buckets or warmup.batch_sizes to what it takes, or export it with a "
    'dynamic batch: dynamic_shapes=({0: torch.export.Dim("batch")},).'
)


@dataclass
class Shapes:
    """What a model is compiled for.

    Attributes:
        inputs: The declared inputs, or those that samples show; None takes every call as it comes.
        sizes: Batch sizes that a batch is padded or split to; None runs each batch at its own size.
        facts: Whether items may be joined; None where nothing is known about the inputs.
        axes: Which axes of each output follow a named dimension.
        signatures: Shapes to compile.
        cases: Calls to warm up and to verify with: one for each signature, and the samples.
        varies: Whether one graph of symbolic sizes serves all shapes from the start, as text of any length needs.
        notes: Remarks for the report.
    """

    inputs: DeclaredInputs | None
    sizes: list[int] | None = None
    facts: probe.RowFacts | None = None
    axes: probe.Axes = field(default_factory=dict)
    signatures: list[Signature] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    varies: bool = False
    notes: list[str] = field(default_factory=list)


def shapes_of(
    eager: Any,
    section: OpenVINOSection,
    *,
    batch_size: int,
    streams: int,
    declared: Sequence[WarmupInput],
    samples: Sequence[ObservedCall],
    learns: bool = True,
    modes_for: Callable[[Inputs], Modes] = lambda inputs: SERVING,
) -> Shapes:
    """Decides what to compile; runs the eager model to find out what it accepts.

    Args:
        eager: The model.
        section: ``handler.openvino``.
        batch_size: TorchServe's batchSize.
        streams: Parts that a batch is split into.
        declared: The model's inputs, one item each; empty where they are unknown.
        samples: Calls that real requests make.
        modes_for: Returns the modes in which the model will be called with given inputs; used without samples.
        learns: Whether samples declare the inputs where nothing else does, so that other inputs are refused.

    Raises:
        ModelLoadError: The model cannot be padded, or does not accept the batch sizes or inputs, as configured.
    """
    shapes = Shapes(_inputs(eager, section, declared, samples if learns else ()))
    shapes.varies = shapes.inputs is None and _varies([sample.inputs for sample in samples])
    if section.batching.mode == "bucket" and not shapes.varies:
        shapes.sizes = bucket_sizes(section.batching.buckets, batch_size, streams)
    if shapes.inputs is not None:
        shapes.facts, shapes.axes = _probe(eager, section, shapes.inputs)
        if not shapes.facts.joins:
            logger.warning("Requests are not batched together, and batches are not padded: %s", shapes.facts.reason)
            shapes.sizes = None
        sizes = batch_sizes(section, batch_size, streams, pads=shapes.sizes is not None)
        accepted = _taken(eager, section, shapes, sizes)
        mode = section.batching.mode
        shortest = _shortest(eager, shapes.inputs) if mode == "dynamic" else None
        shapes.signatures = signatures(accepted, shapes.inputs.dims, mode, shortest)
        rich = richest(shapes.signatures)
        modes = samples[0].modes if samples else modes_for(shapes.inputs.make(shapes.signatures[0]))
        shapes.cases = [_case(shapes.inputs, s, modes, rich=str(s) in rich) for s in shapes.signatures]
    elif not shapes.varies and section.batching.mode != "dynamic":
        shapes.facts = _undeclared_facts(eager, samples)
    shapes.cases += [
        Case(f"sample {s.name}", s.inputs, compiled_shape=False, others=partial(sample_sets, s.inputs), modes=s.modes)
        for s in samples
    ]
    if shapes.inputs is None and shapes.facts is not None:
        shapes.cases += _other_sizes(eager, samples, shapes, batch_sizes(section, batch_size, streams, pads=False))
    return shapes


def _undeclared_facts(eager: Any, samples: Sequence[ObservedCall]) -> probe.RowFacts | None:
    """Returns whether the rows of all samples may be split and padded; None without such a sample."""
    facts = None
    for sample in samples:
        if rows_of(sample.inputs):
            with sample.modes.on():
                facts = probe_first_rows(eager, sample.inputs)
            if not facts.joins:
                break
    return facts


def _other_sizes(eager: Any, samples: Sequence[ObservedCall], shapes: Shapes, requests: Sequence[int]) -> list[Case]:
    """Returns calls of each sample's shape in the batch sizes that no sample has.

    A batch is padded to one of them, or split into several; otherwise it has as many as its requests.

    Args:
        eager: The model; sizes that it does not take are left out.
        samples: Calls that real requests make.
        shapes: Has the sizes that batches are padded to.
        requests: How many requests a batch may have.
    """
    assert shapes.facts is not None
    run = {(items_of(sample.inputs), sample.modes, rows_of(sample.inputs)) for sample in samples}
    cases = []
    for sample in samples:
        items, rows = items_of(sample.inputs), rows_of(sample.inputs)
        one = min(size for other, _, size in run if other == items)
        splits = shapes.facts.joins and shapes.sizes is not None
        sizes = (shapes.sizes or ()) if splits else [one * count for count in requests]
        for size in sizes if rows else ():
            if (key := (items, sample.modes, size)) in run:
                continue
            run.add(key)
            inputs = resized(sample.inputs, size)
            with sample.modes.on():
                refused = probe.refusal(eager, inputs)
            if not refused:
                others, name = partial(sample_sets, inputs), f"sample {sample.name}, batch {size}"
                cases.append(Case(name, inputs, others=others, modes=sample.modes))
    return cases


# dtypes of token ids and their masks; images have others.
_IDS = frozenset({torch.int64, torch.int32, torch.bool})


def _varies(samples: Sequence[Inputs]) -> bool:
    """Checks whether samples look like text (only token ids and masks), or differ in more than the batch size."""
    shapes = set()
    for sample in samples:
        tensors = output_tensors(sample)
        if tensors and all(t.dtype in _IDS and t.dim() for t in tensors):
            return True
        shapes.add(tuple(tuple(t.shape[1:]) for t in tensors))
    return len(shapes) > 1


def _inputs(
    eager: Any, section: OpenVINOSection, declared: Sequence[WarmupInput], samples: Sequence[ObservedCall]
) -> DeclaredInputs | None:
    names = parameter_names(eager)
    specs: list[InputSpec] = declared_specs(declared, names)
    if not specs and samples:
        first, *others = [specs_of_sample(sample.inputs, names) for sample in samples]
        # Samples of different shapes show that shapes vary, but not how.
        specs = first if all(other == first for other in others) else []
    if not specs:
        return None
    batching = section.batching
    return DeclaredInputs(specs, names, batching.dims, pads=batching.mode == "bucket", exact=batching.mode == "exact")


def _probe(eager: Any, section: OpenVINOSection, inputs: DeclaredInputs) -> tuple[probe.RowFacts, probe.Axes]:
    least = Signature(1, {name: sizes[0] for name, sizes in inputs.dims.items()})
    facts = probe.probe_rows(eager, inputs.make(least), inputs.make(least, seed=1))
    if section.batching.mode != "bucket" or not inputs.dims:
        return facts, {}
    axes, unsafe = probe.probe_dims(eager, inputs, least)
    for name, reason in unsafe.items():
        raise ModelLoadError(
            f"{name} cannot be padded to the lengths in handler.openvino.batching.dims: {reason}. Declare the input "
            "that masks the padding (mask: true), or set batching.mode to exact or dynamic."
        )
    return facts, axes


def batch_sizes(section: OpenVINOSection, batch_size: int, streams: int, *, pads: bool = True) -> Sequence[int]:
    """Returns the batch sizes that are compiled before READY.

    Args:
        section: ``handler.openvino``.
        batch_size: TorchServe's batchSize.
        streams: Parts that a batch is split into.
        pads: Whether a batch can be padded to a larger one.
    """
    if section.warmup.batch_sizes != "auto":
        return section.warmup.batch_sizes
    if section.batching.mode == "bucket" and pads:
        return bucket_sizes(section.batching.buckets, batch_size, streams)
    if section.batching.mode == "dynamic":
        return sorted({1, 2, batch_size})
    return range(1, batch_size + 1)


def _taken(eager: Any, section: OpenVINOSection, shapes: Shapes, sizes: Sequence[int]) -> Sequence[int]:
    """Returns the sizes that eager PyTorch accepts: some models, exports and traces accept only certain ones."""
    inputs, facts = shapes.inputs, shapes.facts
    assert inputs is not None and facts is not None
    if facts.joins and not loading.may_have_fixed_sizes(eager):
        return sizes
    dims = {name: lengths[0] for name, lengths in inputs.dims.items()}
    refused = {n: why for n in sizes if (why := probe.refusal(eager, inputs.make(Signature(n, dims))))}
    if not refused:
        return sizes
    taken = [n for n in sizes if n not in refused]
    first, reason = next(iter(refused.items()))
    if not taken and len(set(refused.values())) == 1:
        raise ModelLoadError(
            f"eager PyTorch does not take the inputs that are declared ({inputs}): {reason}. Fix "
            f"handler.openvino.warmup.inputs: shape, dtype{_weights_of(eager)}, low and high (ids lie below the "
            "size of the vocabulary)."
        )
    message = f"the model takes no batch of {', '.join(map(str, refused))}: eager PyTorch raises {reason!r} for {first}"
    if not taken and 1 in refused:
        raise ModelLoadError(
            f"{message}. If the declared inputs ({inputs}) are wrong, fix handler.openvino.warmup.inputs; "
            f"else {_BATCHES}"
        )
    if not taken or section.warmup.batch_sizes != "auto":
        raise ModelLoadError(f"{message}: {_BATCHES}")
    note = f"served at batches of {', '.join(map(str, taken))} only: {message}"
    logger.warning("Requests are %s", note)
    shapes.notes.append(f"requests are {note}")
    if shapes.sizes is not None:
        shapes.sizes = [n for n in shapes.sizes if n in taken]
    return taken


def _shortest(eager: Any, inputs: DeclaredInputs) -> dict[str, int]:
    """Returns the least length of each named dimension: 1, or the least declared one where eager does not take 1.

    A convolution without padding takes nothing shorter than its kernel.
    """
    least = {name: sizes[0] for name, sizes in inputs.dims.items()}
    return {
        name: 1 if not probe.refusal(eager, inputs.make(Signature(1, {**least, name: 1}))) else size
        for name, size in least.items()
    }


def _weights_of(eager: Any) -> str:
    """Returns the dtypes of a model's weights as text for a message."""
    kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in eager.parameters()})
    return f" (the weights are {', '.join(kinds)})" if kinds else ""


def _case(inputs: DeclaredInputs, signature: Signature, modes: Modes, *, rich: bool) -> Case:
    others = partial(value_sets, inputs, signature, rich=rich)
    return Case(str(signature), inputs.make(signature), others=others, modes=modes)


# --- calls of a model whose inputs are not declared: how many rows they have, and the same in other batch sizes


def rows_of(inputs: Inputs) -> int:
    """Returns the size of the first axis of all inputs; 0 if they are not all tensors with the same one."""
    leaves = pytree.tree_leaves((tuple(inputs[0]), inputs[1]))
    sizes = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0 for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def items_of(inputs: Inputs) -> Any:
    """Returns what distinguishes calls besides their rows: structure, shapes of one row, and dtypes; hashable."""
    leaves, spec = pytree.tree_flatten((tuple(inputs[0]), inputs[1]))
    return repr(spec), tuple(
        (leaf.shape[1:], leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
    )


def resized(inputs: Inputs, rows: int) -> Inputs:
    """Returns inputs with another number of rows: the first ones, over and over."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % tensor.shape[0]]

    with torch.inference_mode(False):
        args, kwargs = pytree.tree_map_only(torch.Tensor, of, (tuple(inputs[0]), inputs[1]))
    return args, kwargs


def probe_first_rows(eager: Callable[..., Any], inputs: Inputs) -> RowFacts:
    """Probes eager PyTorch with the first row of a call, and with other values like it."""
    first = pytree.tree_map(lambda t: t[:1], (tuple(inputs[0]), inputs[1]))
    return probe_rows(eager, first, pytree.tree_map(_like, first))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same values in another order, floats also scaled, each by another factor, so that sums differ too.

    Zeros and infinities, of which masks consist, stay what they are, and so do ids.
    """
    turned = tensor.flip(tuple(range(1, tensor.dim())))
    if not turned.is_floating_point():
        return turned
    return turned * torch.linspace(1.0, 1.5, turned.numel()).reshape(turned.shape).to(turned.dtype)
