"""A model of transformers whose encoder and decoder run by compiled graphs, step by step or by its own `generate`."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.backend import eager_watch
from torchserve_openvino.errors import InvalidInputError, ModelLoadError
from torchserve_openvino.generation.compiled.layout import IDS, GraphSizes, layout_of, memory, model_input
from torchserve_openvino.generation.graph_calls import GraphCalls, SizedGraph
from torchserve_openvino.serving.modes import SERVING
from torchserve_openvino.serving.shapes.inputs import ordinary
from torchserve_openvino.serving.shapes.plan import Shapes
from torchserve_openvino.serving.shapes.value_sets import ValueSet
from torchserve_openvino.serving.shapes.warmup import Case


class CompiledGeneration:
    """The graphs of a model: compile its `parts`, then generate.

    Before they are compiled, all of it runs in eager PyTorch, with the same results.

    Args:
        model: A model of transformers in evaluation mode, float32; it stays as it is.
        sizes: What to compile for.

    Attributes:
        model: The model.
        sizes: What is compiled.
        layout: What the graphs take and give.

    Raises:
        ModelLoadError: The model keeps something else than keys and values of each layer of its decoder.
    """

    def __init__(self, model: nn.Module, sizes: GraphSizes) -> None:
        # Imported here: they import transformers, which takes seconds.
        from torchserve_openvino.generation.compiled import caches, step_graphs

        self.model, self.sizes = model, sizes
        self.layout = layout = layout_of(model, sizes)
        self._caches = caches
        batches, bare = sizes.batches, _bare(model)
        decoder = with_tables(bare, sizes.places)
        self._steps = {
            count: RowCalls(f"step of {count}" if count > 1 else "step", step_graphs.StepGraph(decoder, layout, count),
                            batches, self._made_step(count))
            for count in sorted({1, *sizes.steps})
        }  # fmt: skip
        self._encoders: dict[int, RowCalls] = {}
        self._cross: RowCalls | None = None
        if layout.encodes:
            self._cross = RowCalls("cross-attention", step_graphs.CrossGraph(bare, layout), batches, self._make_hidden)
            masked = model_input(model) == IDS
            for length in sorted(sizes.texts) if masked else [0]:
                graph = step_graphs.EncoderGraph(model, masked=masked)
                name = f"encoder of {length}" if length else "encoder"
                self._encoders[length] = RowCalls(name, graph, batches, self._made_text(length))

    def parts(self) -> Iterator[SizedGraph]:
        """Yields the graphs to compile (`generation.graph_calls.compile_parts`)."""
        cross = [self._cross] if self._cross is not None else []
        for rows in (*self._encoders.values(), *cross, *self._steps.values()):
            yield rows.part

    # --- the encoder --------------------------------------------------------------------------------------------

    def encode(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Runs the encoder.

        Args:
            values: Tokens, int64 ``[batch, length]``, or features, float32 ``[batch, ...]``.
            mask: int64 ``[batch, length]``: 0 for padding; None if there is none.

        Returns:
            float32 ``[batch, places, width]``; for tokens as many places as tokens.

        Raises:
            InvalidInputError: The input is too long, or of another shape.
        """
        if values.is_floating_point():
            features = self.sizes.features
            if tuple(values.shape[1:]) != features:
                raise InvalidInputError(f"the encoder takes {list(features)}, not {list(values.shape[1:])}")
            return self._encoders[0](values.contiguous())[0]
        length = values.shape[1]
        size = next((encoder for encoder in sorted(self._encoders) if encoder >= length), None)
        if size is None or length == 0:
            raise InvalidInputError(f"the input has {length} tokens; the encoder takes 1 to {max(self._encoders)}")
        seen = torch.ones_like(values) if mask is None else mask.to(torch.int64)
        hidden = self._encoders[size](_widened(values, size), _widened(seen, size))[0]
        return hidden if length == size else hidden[:, :length].contiguous()

    # --- the decoder --------------------------------------------------------------------------------------------

    def cache(self, batch: int, hidden: Tensor | None = None) -> Any:
        """Returns a cache without tokens for the decoder.

        Args:
            batch: Number of sequences.
            hidden: The encoder's output, float32 ``[batch, places, width]``.

        Raises:
            InvalidInputError: The encoder's output has more places than were compiled.
        """
        cross = None
        if self._cross is not None:
            if hidden is None:
                raise InvalidInputError("a sequence of a model with an encoder needs the encoder's output")
            if hidden.shape[1] > self.layout.source:
                raise InvalidInputError(
                    f"the encoder's output has {hidden.shape[1]} places; the decoder takes up to {self.layout.source}"
                )
            cross = self._cross(_widened(hidden, self.layout.source))
        # An inference tensor could not be written to by a call that is made outside of inference mode.
        with SERVING.on():
            own = memory(self.layout.layers, batch, self.sizes.places)
        return self._caches.between_calls(own, cross)

    def bytes_of_a_sequence(self) -> int:
        """Returns how much memory the keys and values of one sequence take, in bytes."""
        shapes = [*[(layer, self.sizes.places) for layer in self.layout.layers],
                  *[(shape, self.layout.source) for shape in self.layout.cross]]  # fmt: skip
        return sum(shape.heads * (shape.key + shape.value) * places * 4 for shape, places in shapes)

    def step(
        self, cache: Any, ids: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None,
        source: Tensor | None = None,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Runs the first of some new tokens: as many as one compiled call takes.

        Args:
            cache: What `cache` made; it gets the tokens.
            ids: The new tokens, int64 ``[batch, count]``.
            mask: Of those in the cache and the new ones, ``[batch, all]``: 0 for padding; None if there is none.
            positions: Of the new ones, int64 ``[batch, count]``; None counts places.
            source: Mask of the encoder's output, ``[batch, places]``; None where the decoder takes none.

        Returns:
            Logits after the last token that ran, float32 ``[batch, vocabulary]``; and how many ran.

        Raises:
            InvalidInputError: The sequence gets too long.
        """
        layout, places = self.layout, self.sizes.places
        own = self._caches.own_layers(cache)
        past, (batch, length) = own[0].length, ids.shape
        if past + length > places:
            raise InvalidInputError(f"the sequence gets {past + length} tokens; at most {places} were compiled")
        size = self._size(length, places - past)
        count = min(size, length)
        inputs: list[Tensor] = [_widened(ids[:, :count], size)]
        if layout.mask:
            seen = ids[:, :0] if mask is None else mask[:, : past + length].to(torch.int64)
            inputs.append(_widened(seen, places, fill=1))
        if layout.positions:
            counted = torch.arange(past, past + count).expand(batch, count) if positions is None else positions
            inputs.append(_widened(counted[:, :count], size))
        inputs.append(torch.full((batch,), past))
        if size > 1:
            inputs.append(torch.full((batch,), count - 1))
        if layout.masks_source:
            assert source is not None
            inputs.append(_widened(source.to(torch.int64), layout.source))
        inputs += [tensor for layer in own for tensor in (layer.keys, layer.values)]
        if layout.encodes:
            inputs += [tensor for layer in self._caches.cross_layers(cache) for tensor in (layer.keys, layer.values)]
        logits, *new = self._steps[size](*inputs)
        with SERVING.on():
            for layer, keys, values in zip(own, new[::2], new[1::2], strict=True):
                # Beams put the rows in another order, in the mode of whoever generates.
                layer.keys, layer.values = ordinary(layer.keys), ordinary(layer.values)
                layer.keys[:, :, past : past + count] = keys[:, :, :count]
                layer.values[:, :, past : past + count] = values[:, :, :count]
                layer.length = past + count
        return logits, count

    def run(
        self, cache: Any, ids: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None,
        source: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `step`, for all new tokens, of which there is at least one."""
        done = 0
        while True:
            rest = None if positions is None else positions[:, done:]
            logits, count = self.step(cache, ids[:, done:], mask=mask, positions=rest, source=source)
            done += count
            if done == ids.shape[1]:
                return logits

    def _size(self, length: int, room: int) -> int:
        """Returns how many tokens to compute at once: the fewest that suffice, or the most there are."""
        fitting = [size for size in self._steps if size <= room]
        return min((size for size in fitting if size >= length), default=max(fitting))

    # --- values to compile and to verify with ---------------------------------------------------------------------

    def _made_step(self, count: int) -> Any:
        def make(rows: int, seed: int) -> list[Tensor]:
            layout, places, draw = self.layout, self.sizes.places, Draw.seeded(seed)
            # The ends of the cache, and somewhere between.
            start = (int(draw.numbers(1, below=places - count + 1)), 0, places - count, places // 2)[seed % 4]
            start = min(start, places - count)
            inputs = [draw.numbers(rows, count, below=layout.vocabulary)]
            if layout.mask:
                inputs.append(torch.ones(rows, places, dtype=torch.int64))
            if layout.positions:
                inputs.append(torch.arange(start, start + count).repeat(rows, 1))
            inputs.append(torch.full((rows,), start))
            if count > 1:
                inputs.append(torch.full((rows,), int(draw.numbers(1, below=count))))
            if layout.masks_source:
                inputs.append(_lengths(rows, layout.source))
            for layers, size in ((layout.layers, places), (layout.cross, layout.source)):
                for layer in layers:
                    inputs += [
                        draw.normal(rows, layer.heads, size, layer.key),
                        draw.normal(rows, layer.heads, size, layer.value),
                    ]
            return inputs

        return make

    def _made_text(self, length: int) -> Any:
        def make(rows: int, seed: int) -> list[Tensor]:
            draw = Draw.seeded(seed)
            if not length:
                return [draw.normal(rows, *self.sizes.features)]
            mask = torch.ones(rows, length, dtype=torch.int64) if seed % 2 else _lengths(rows, length)
            return [draw.numbers(rows, length, below=self.layout.vocabulary), mask]

        return make

    def _make_hidden(self, rows: int, seed: int) -> list[Tensor]:
        return [Draw.seeded(seed).normal(rows, self.layout.source, self.layout.width)]


def _bare(model: nn.Module) -> nn.Module:
    """Returns a copy that shares all but the settings of `generate`, which forward does not read.

    They hold a hash that differs in each process, by which the cache would not know the model again.
    """
    bare = copy.copy(model)
    vars(bare).pop("generation_config", None)
    return bare


def _widened(tensor: Tensor, size: int, *, fill: int = 0) -> Tensor:
    """Returns a tensor with its second axis padded at the end, in memory of its own order."""
    missing = size - tensor.shape[1]
    if not missing:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)], 1)


def _lengths(rows: int, length: int) -> Tensor:
    """Returns a mask for rows of different lengths, ``[rows, length]``."""
    real = torch.tensor([max(1, length * (row + 1) // (rows + 1)) for row in range(rows)])
    return (torch.arange(length) < real[:, None]).to(torch.int64)


# --- attention that depends on distances (T5's): a table takes the place of their computation ---------------------
# T5 sorts distances into buckets by their logarithm, and takes the logarithm of 0 where it does not use the result.
# That is no integer which OpenVINO could compute. What the buckets give depends on the distance only, so it is
# computed here, once for each distance, by the model itself.


_BIAS, _PAST = "compute_bias", "past_seen_tokens"


class _ByTable:
    """Takes the place of an attention's own `compute_bias`."""

    by_distance: Tensor

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:  # fmt: skip
        """Returns what is added to scores, ``[1, heads, queries, keys]``."""
        places = (len(self.by_distance) + 1) // 2
        queries = torch.arange(query_length)[:, None] + past_seen_tokens
        distances = torch.arange(key_length)[None] - queries + places - 1
        # Queries behind the last place are padding.
        biases = self.by_distance[distances.clamp(0, 2 * places - 2)]
        return biases.permute(2, 0, 1)[None]


def _tabled(kind: type) -> type:
    return type(f"{kind.__name__}ByTable", (_ByTable, kind), {"__module__": __name__})


def with_tables(model: nn.Module, places: int) -> nn.Module:
    """Returns the model, with tables in its decoder where it computes by distances; the original stays as it is.

    Args:
        model: A model of transformers.
        places: Most tokens of the decoder.

    Raises:
        ModelLoadError: It computes otherwise than tables can.
    """
    for path, module in list(model.named_modules()):
        if (
            hasattr(module, "relative_attention_bias")
            and hasattr(module, _BIAS)
            and getattr(module, "is_decoder", True)
        ):
            model = _replaced(model, path.split("."), _with_table(module, places))
    return model


def _with_table(attention: Any, places: int) -> nn.Module:
    name = type(attention).__name__
    if _PAST not in inspect.signature(attention.compute_bias).parameters:
        raise ModelLoadError(f"{name} computes its distances in a way that is not known here.")
    tabled = copy.copy(attention)
    tabled.__class__ = _tabled(type(attention))
    tabled._buffers = dict(attention._buffers)
    with torch.no_grad():
        # To all keys: from the last place, distances up to 0; from the first one, those from 0.
        before = attention.compute_bias(1, places, past_seen_tokens=places - 1)[0, :, 0]
        after = attention.compute_bias(1, places, past_seen_tokens=0)[0, :, 0]
        tabled.register_buffer("by_distance", torch.cat([before, after[:, 1:]], 1).t().contiguous(), persistent=False)
        middle = {"query_length": min(2, places), "key_length": places, _PAST: places // 2 if places > 2 else 0}
        if not torch.equal(tabled.compute_bias(**middle), attention.compute_bias(**middle)):
            raise ModelLoadError(f"{name} computes something else of a place than its distance.")
    return tabled


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """Returns a copy of a module with another one at a path; all else is shared."""
    if not path:
        return new
    replaced = copy.copy(module)
    replaced._modules = dict(module._modules)
    inner = replaced._modules[path[0]]
    assert inner is not None
    replaced._modules[path[0]] = _replaced(inner, path[1:], new)
    return replaced


# --- calls of a model's graphs: in eager PyTorch until compiled ones take their place, in pieces that were compiled


Make = Callable[[int, int], list[Tensor]]


class RowCalls(GraphCalls):
    """Calls of a graph whose inputs have rows that do not depend on each other.

    Args:
        name: For the report.
        graph: The module.
        batches: Numbers of rows that are compiled; others run in several calls.
        make: Makes inputs to compile and to verify with, from a number of rows and a seed.
    """

    def __init__(self, name: str, graph: nn.Module, batches: Sequence[int], make: Make) -> None:
        super().__init__(graph)
        self._name, self._make = name, make
        self._batches = tuple(sorted({1, *batches}))
        self._run: Callable[..., Any] = self.graph

    @property
    def part(self) -> SizedGraph:
        """What to compile."""
        known = Shapes(None, cases=[self._case(rows) for rows in self._batches])
        return SizedGraph(self._name, self, (), self._batches, known)

    def use(self, shape: Sequence[int], compiled: Any) -> None:
        """Runs calls by what was compiled from now on."""
        # Its inputs are made here, so that there is nothing to check or to pad.
        self._run = compiled.compiled

    def __call__(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        """Runs a call of any number of rows, in as many calls as it takes.

        Args:
            *inputs: Contiguous, ``[rows, ...]`` each.
            **named: None.

        Returns:
            The outputs, ``[rows, ...]`` each.
        """
        rows = len(inputs[0])
        with eager_watch.compiled(), SERVING.on():
            columns = [ordinary(tensor) for tensor in inputs]
            outputs = [
                self._once([column[first:last] for column in columns] if last - first < rows else columns)
                for first, last in self._pieces(rows)
            ]
        return outputs[0] if len(outputs) == 1 else tuple(torch.cat(rows) for rows in zip(*outputs, strict=True))

    def _once(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = self._run(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    def _pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        first = 0
        while first < rows:
            size = max(batch for batch in self._batches if batch <= rows - first)
            yield first, first + size
            first += size

    def _case(self, rows: int) -> Case:
        def others() -> list[ValueSet]:
            return [ValueSet(f"random {seed}", (tuple(self._make(rows, seed)), {})) for seed in (1, 2, 3)]

        return Case(f"batch {rows}", (tuple(self._make(rows, 0)), {}), others=others)


@dataclass(frozen=True)
class Draw:
    """Random values for inputs, the same for an equal seed."""

    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int) -> "Draw":
        """Returns values for a seed."""
        return cls(torch.Generator().manual_seed(seed))

    def numbers(self, *shape: int, below: int) -> Tensor:
        """Returns int64 from 0."""
        return torch.randint(0, max(1, below), shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Returns float32."""
        return torch.randn(shape, generator=self.generator)
