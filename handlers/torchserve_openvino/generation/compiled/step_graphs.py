"""The modules that are compiled: tensors in, tensors out, none of which they write to.

What they reach holds plain values only, no dataclasses: the cache describes it, to know them again at a warm start.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.generation.compiled.caches import CachePositions, cross_layers, in_graph, own_layers
from torchserve_openvino.generation.compiled.layout import IDS, GraphLayout, encoder_of, model_input


class EncoderGraph(nn.Module):
    """The encoder.

    Args:
        model: The whole model.
        masked: Whether it takes a mask.
    """

    def __init__(self, model: nn.Module, *, masked: bool) -> None:
        super().__init__()
        self.encoder = encoder_of(model)
        self._name = model_input(model)
        self._masked = masked

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps tokens, int64 ``[batch, length]``, or features to states, float32 ``[batch, places, width]``."""
        masked = {"attention_mask": mask} if self._masked else {}
        states: Tensor = self.encoder(**{self._name: values}, **masked).last_hidden_state
        return _own(states)


class _DecoderGraph(nn.Module):
    """Calls the whole model for its decoder.

    Args:
        model: The whole model.
        layout: What its graphs take and give.
    """

    def __init__(self, model: nn.Module, layout: GraphLayout) -> None:
        super().__init__()
        self.model = model
        self._layers = len(layout.layers)
        self._cache, self._mask, self._positions = layout.cache, layout.mask, layout.positions
        self._picks, self._masks_source = layout.picks, layout.masks_source
        self._source, self._width = layout.source, layout.width

    def _logits(
        self, cache: Any, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None,
        position: Tensor | None = None, hidden: Tensor | None = None, source: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the logits after one of the tokens, ``[batch, vocabulary]``.

        Args:
            cache: The decoder's cache, which gets the new keys and values.
            ids: The decoder's tokens, ``[batch, count]``.
            mask: Of all places.
            positions: Of the tokens.
            place: Which token the logits are for, ``[1]``; None for the only one.
            hidden: The encoder's output.
            source: Its mask.
        """
        arguments: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if mask is not None:
            arguments[self._mask] = mask
        if positions is not None:
            arguments[self._positions] = positions
        if hidden is None:
            arguments[IDS] = ids
        else:
            arguments["decoder_input_ids"], arguments["encoder_outputs"] = ids, (hidden,)
        if source is not None:
            arguments["attention_mask"] = source
        if position is not None and self._picks:
            arguments["logits_to_keep"] = position
        logits: Tensor = self.model(**arguments).logits
        if position is not None and not self._picks:
            logits = logits.index_select(1, position)
        return logits[:, 0]


class CrossGraph(_DecoderGraph):
    """Computes what the decoder's layers need of the encoder's output, once for a sequence.

    Args:
        model: The whole model.
        layout: What its graphs take and give.
    """

    def __init__(self, model: nn.Module, layout: GraphLayout) -> None:
        super().__init__(model, layout)
        self._own = tuple((layer.heads, size) for layer in layout.layers for size in (layer.key, layer.value))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Maps states, float32 ``[batch, places, width]``, to keys and values of each layer in turn."""
        batch = hidden.shape[0]
        own = [torch.zeros(batch, heads, 1, size) for heads, size in self._own]
        cache = in_graph(own, (), self._layers, CachePositions(torch.zeros((), dtype=torch.int64), 1, 1))
        # Of what this computes, only keys and values of the encoder's output are used; the rest is not compiled.
        self._logits(cache, torch.zeros(batch, 1, dtype=torch.int64), hidden=hidden)
        return tuple(_own(tensor) for layer in cross_layers(cache) for tensor in (layer.keys, layer.values))


class StepGraph(_DecoderGraph):
    """The decoder on some tokens after those in its cache.

    Args:
        model: The whole model.
        layout: What its graphs take and give.
        count: How many tokens.
    """

    def __init__(self, model: nn.Module, layout: GraphLayout, count: int) -> None:
        super().__init__(model, layout)
        self._count = count

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the tokens.

        Args:
            *inputs: Tokens, int64 ``[batch, count]``; the mask of all places, int64 ``[batch, places]``, if the model
                takes one; positions of the tokens, ``[batch, count]``, if the model takes them; the place of the first,
                ``[batch]``, equal in all rows; if there are several, which of them the logits are for, ``[batch]``,
                equal in all rows; the mask of the encoder's output, ``[batch, source]``, if the model takes one; then
                keys and values of each layer in turn, ``[batch, heads, places, features]``; then, with an encoder,
                those of its output.

        Returns:
            Logits, float32 ``[batch, vocabulary]``; then keys and values of the new tokens, for each layer in turn.
        """
        remaining = list(inputs)
        ids = remaining.pop(0)
        mask = remaining.pop(0) if self._mask else None
        positions = remaining.pop(0) if self._positions else None
        start = remaining.pop(0)[0]
        position = remaining.pop(0)[:1] if self._count > 1 else None
        source = remaining.pop(0) if self._masks_source else None
        own, cross = remaining[: 2 * self._layers], remaining[2 * self._layers :]
        written = CachePositions(start, self._count, own[0].shape[2])
        cache = in_graph(own, cross if self._source else None, self._layers, written)
        hidden = torch.zeros(ids.shape[0], self._source, self._width) if self._source else None
        logits = self._logits(cache, ids, mask, positions, position, hidden, source)
        new = [tensor for layer in own_layers(cache) for tensor in layer.new]
        return _own(logits), *(_own(tensor) for tensor in new)


def _own(result: Tensor) -> Tensor:
    """Returns a result in memory of its own, in the order in which the next graph takes it."""
    return result.clone(memory_format=torch.contiguous_format)
