"""What a model's graphs take and give: found by running a single token in eager PyTorch."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.errors import ModelLoadError, first_line
from torchserve_openvino.generation.text.exporting.exported_language_model import cache_argument

# Names of models' arguments, without and with an encoder.
_POSITIONS = ("position_ids", "decoder_position_ids")
_MASKS = ("attention_mask", "decoder_attention_mask")
IDS = "input_ids"


@dataclass(frozen=True)
class KeyShape:
    """What a layer caches for one token: ``heads`` keys and values of so many features."""

    heads: int
    key: int
    value: int


@dataclass(frozen=True)
class GraphSizes:
    """The sizes that graphs are compiled for.

    Attributes:
        places: Most tokens of the decoder in one sequence, prompt and answer together.
        steps: Numbers of tokens that one call of the decoder computes, above 1; a call of one token is always there.
        batches: Numbers of rows in one call; others run in several calls. 1 is always there.
        texts: For a model with an encoder of texts: lengths of its input, ascending.
        features: For an encoder of something else: shape of one item, such as ``(80, 3000)``.
    """

    places: int
    steps: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    texts: tuple[int, ...] = ()
    features: tuple[int, ...] = ()


@dataclass(frozen=True)
class GraphLayout:
    """What the graphs of a model take and give.

    Attributes:
        vocabulary: Tokens are less than this.
        layers: What each layer of the decoder caches.
        cross: The same for the encoder's output; empty without an encoder.
        cache: Name of the argument that takes the cache.
        mask: Name of the argument that masks tokens of the decoder; empty if there is none.
        positions: Name of the argument for positions; empty if there is none.
        picks: Whether logits of one place can be asked for (``logits_to_keep``).
        source: Most places of the encoder's output; 0 without an encoder.
        width: Features of the encoder's output.
        masks_source: Whether the decoder masks places of the encoder's output.
    """

    vocabulary: int
    layers: tuple[KeyShape, ...]
    cross: tuple[KeyShape, ...]
    cache: str
    mask: str
    positions: str
    picks: bool
    source: int = 0
    width: int = 0
    masks_source: bool = False

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder."""
        return self.source > 0


def layout_of(model: nn.Module, sizes: GraphSizes) -> GraphLayout:
    """Runs one token in eager PyTorch, and returns the layout.

    Raises:
        ModelLoadError: The model keeps something else than keys and values of each layer, or the sizes do not fit it.
    """
    # Imported here: it takes seconds, which only workers of models of transformers need.
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    config: Any = model.config
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    name, cache_name = type(model).__name__, cache_argument(model)
    token = torch.zeros(1, 1, dtype=torch.int64)
    hidden: Tensor | None = None
    cache: Any = DynamicCache()
    try:
        with torch.no_grad():
            arguments: dict[str, Any] = {IDS: token}
            if encodes:
                hidden = _encoded(model, sizes)
                cache = EncoderDecoderCache(cache, DynamicCache())
                arguments = {"decoder_input_ids": token, "encoder_outputs": (hidden,)}
            logits = model(**arguments, use_cache=True, **{cache_name: cache}).logits
        own = cache.self_attention_cache if encodes else cache
        layers = tuple(_shape(layer) for layer in own.layers)
        cross = tuple(_shape(layer) for layer in cache.cross_attention_cache.layers) if encodes else ()
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        line = first_line(error)
        raise ModelLoadError(f"{name} does not keep keys and values of each layer of its decoder: {line}") from error
    if not layers or (encodes and len(cross) != len(layers)):
        raise ModelLoadError(f"{name} caches {len(layers)} and {len(cross)} layers of keys and values.")
    parameters = inspect.signature(model.forward).parameters
    texts = model_input(model) == IDS
    return GraphLayout(
        int(logits.shape[-1]),
        layers,
        cross,
        cache_name,
        next((mask for mask in _MASKS[encodes:] if mask in parameters), "") if encodes else _MASKS[0],
        _POSITIONS[encodes] if _POSITIONS[encodes] in parameters else "",
        "logits_to_keep" in parameters,
        (max(sizes.texts) if texts else int(hidden.shape[1])) if hidden is not None else 0,
        int(hidden.shape[2]) if hidden is not None else 0,
        encodes and texts,
    )


def model_input(model: nn.Module) -> str:
    """Returns the name of a model's main input: of its encoder, if it has one."""
    return str(getattr(model, "main_input_name", IDS))


def encoder_of(model: nn.Module) -> nn.Module:
    """Returns the encoder of a model that has one."""
    encoder: nn.Module = model.get_encoder()  # type: ignore[operator]
    return encoder


def _encoded(model: nn.Module, sizes: GraphSizes) -> Tensor:
    name = model_input(model)
    if name == IDS:
        if not sizes.texts:
            raise ModelLoadError(f"{type(model).__name__} has an encoder, for which no lengths of texts were given.")
        values = torch.zeros(1, min(sizes.texts), dtype=torch.int64)
    else:
        if not sizes.features:
            raise ModelLoadError(f"{type(model).__name__} has an encoder, for which no shape of features was given.")
        values = torch.zeros(1, *sizes.features)
    states: Tensor = encoder_of(model)(**{name: values}).last_hidden_state
    return states


def _shape(layer: Any) -> KeyShape:
    keys, values = layer.keys, layer.values
    return KeyShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))


def memory(layers: Sequence[KeyShape], batch: int, places: int) -> list[Tensor]:
    """Returns zeros for keys and values of each layer in turn, ``[batch, heads, places, features]``."""
    return [
        torch.zeros(batch, layer.heads, places, features) for layer in layers for features in (layer.key, layer.value)
    ]
