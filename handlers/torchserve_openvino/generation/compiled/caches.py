"""Caches of keys and values in transformers' form, inside graphs and between their calls.

transformers' own cache of fixed size (StaticCache) writes into its tensors, which a graph that runs without Dynamo must
not do. Here a graph takes all keys and values as inputs, and returns those of the new tokens; whoever calls it writes
them into the memory that the next call takes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from torchserve_openvino.errors import GenerationError


class CachePositions:
    """Where new tokens go among the places of a cache.

    Args:
        start: Place of the first, int64 scalar; those before it hold tokens.
        count: How many there are.
        places: How many places.

    Attributes:
        start: As above.
    """

    def __init__(self, start: Tensor, count: int, places: int) -> None:
        which = torch.arange(places) - start
        self.start = start
        self._inside = ((which >= 0) & (which < count))[:, None]
        # Which new token each place gets; places outside get any, and then keep their own.
        self._index = which.clamp(0, count - 1) if count > 1 else None

    def into(self, old: Tensor, new: Tensor) -> Tensor:
        """Returns ``[batch, heads, places, features]`` with the new tokens' in their places."""
        spread = new if self._index is None else new.index_select(2, self._index)
        return torch.where(self._inside, spread, old)


class _Layer(CacheLayerMixin):
    """What the layers below share: memory that is there from the start."""

    keys: Any
    values: Any

    def __init__(self, keys: Tensor | None, values: Tensor | None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Has nothing to do."""

    def get_max_length(self) -> int:
        """Returns how many tokens fit."""
        return int(self.keys.shape[2]) if self.keys is not None else -1

    # The name of the same in transformers up to 5.23.
    get_max_cache_shape = get_max_length


class InGraph(_Layer):
    """Keys and values of one layer inside a graph.

    Attributes:
        new: Those of the new tokens, ``[batch, heads, tokens, features]`` each.
    """

    # Models then mask the places after the token, as with transformers' StaticCache.
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, written: CachePositions) -> None:
        super().__init__(keys, values)
        self._written = written
        self.new: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns all keys and values, with those of the new tokens in their places."""
        self.new = key_states, value_states
        return self._written.into(self.keys, key_states), self._written.into(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of places, and the first."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Returns how many tokens are before the new ones, as a scalar."""
        return self._written.start


class CrossInGraph(_Layer):
    """Keys and values of the encoder's output for one layer of the decoder, inside a graph.

    Args:
        keys: None where the graph computes them.
        values: As keys.
    """

    is_compileable = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps what the graph computed."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of places, and the first."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Returns how many tokens the encoder's output has; 0 if its keys are not known yet."""
        return max(0, self.get_max_length()) if self.is_initialized else 0


class Kept(_Layer):
    """Keys and values of one layer between calls: memory for all places, of which some hold tokens.

    Attributes:
        length: How many hold tokens.
    """

    # `generate` then passes masks as they are, and graphs make their own of them.
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        super().__init__(keys, values)
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuses: only compiled graphs compute keys and values."""
        raise GenerationError("the cache of a compiled model was given to a model in eager PyTorch")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many places hold tokens after the next call, and the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Returns how many places hold tokens."""
        return self.length


def in_graph(own: Sequence[Tensor], cross: Sequence[Tensor] | None, layers: int, written: CachePositions) -> Cache:
    """Makes the cache that a model gets inside a graph.

    Args:
        own: Keys and values of each layer in turn.
        cross: Those of the encoder's output; empty where the graph computes them, None for a model without encoder.
        layers: How many layers.
        written: Where new tokens go.
    """
    cache = Cache(layers=[InGraph(own[2 * n], own[2 * n + 1], written) for n in range(layers)])
    if cross is None:
        return cache
    pairs = [(cross[2 * n], cross[2 * n + 1]) if cross else (None, None) for n in range(layers)]
    return EncoderDecoderCache(cache, Cache(layers=[CrossInGraph(*pair) for pair in pairs]))


def own_layers(cache: Any) -> list[Any]:
    """Returns the layers of a decoder's own cache."""
    return list((cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache).layers)


def cross_layers(cache: Any) -> list[Any]:
    """Returns the layers with keys and values of the encoder's output."""
    return list(cache.cross_attention_cache.layers)


def between_calls(own: Sequence[Tensor], cross: Sequence[Tensor] | None) -> Cache:
    """Makes a cache that holds no tokens yet.

    Args:
        own: Memory for keys and values of each layer in turn.
        cross: Keys and values of the encoder's output; None for a model without encoder.
    """
    cache = Cache(layers=[Kept(*pair) for pair in zip(own[::2], own[1::2], strict=True)])
    if cross is None:
        return cache
    pairs = zip(cross[::2], cross[1::2], strict=True)
    return EncoderDecoderCache(cache, Cache(layers=[Kept(k, v, int(k.shape[2])) for k, v in pairs]))
