"""What a model's configuration says about serving it: how long its sequences may be, and what is not supported.

OpenVINO GenAI keeps keys and values in pages and masks attention itself: each token sees all tokens before it. A model
that attends differently is refused by name, unless its sequences are too short to show the difference.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torchserve_openvino.errors import ModelLoadError

# Longer sequences are served if `generate.max_length` says so.
USUAL_LENGTH = 4096
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Rotary embeddings whose angles depend on the length of the sequence, once it exceeds the original one.
_BY_LENGTH = {"dynamic", "longrope"}


def length_of(config: Any, max_length: int | None) -> int:
    """Returns the longest sequence to serve, in tokens.

    Args:
        config: The model's configuration (``transformers.PreTrainedConfig``).
        max_length: `generate.max_length`.

    Raises:
        ModelLoadError: The model was not made for such lengths, or needs attention that is not supported.
    """
    _check_kind(config)
    return length_within(config.model_type, dict(bounds(config)), max_length)


def length_within(name: str, limits: Mapping[str, int], max_length: int | None) -> int:
    """Returns the longest sequence to serve, in tokens.

    Args:
        name: The model's type, for the message.
        limits: As `bounds` yields.
        max_length: `generate.max_length`.

    Raises:
        ModelLoadError: The model was not made for such lengths.
    """
    if max_length is None:
        return min([USUAL_LENGTH, *limits.values()])
    for reason, bound in limits.items():
        if max_length > bound:
            raise ModelLoadError(
                f"generate.max_length is {max_length}, but {name} {reason}: set generate.max_length to {bound} or less."
            )
    return max_length


def _check_kind(config: Any) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} has an encoder; generate.engine: genai serves decoders only.")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelLoadError(
            f"{name} limits its attention scores (attn_logit_softcapping), which paged attention does not."
        )
    if unknown := set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS:
        raise ModelLoadError(f"{name} has layers of kind {', '.join(sorted(unknown))}, which cannot be paged.")


def bounds(config: Any, *, paged: bool = True) -> Iterator[tuple[str, int]]:
    """Yields reasons with the length up to which they do not matter.

    Args:
        config: The model's configuration.
        paged: Whether each token sees all tokens before it, as with paged attention.
    """
    # T5 counts distances, which do not end.
    for key in _LENGTHS if not hasattr(config, "relative_attention_num_buckets") else ():
        if isinstance(length := getattr(config, key, None), int):
            yield f"was made for {length} tokens ({key})", length
            break
    if paged and (window := _window(config)) is not None:
        yield f"sees only the last {window} tokens (sliding_window), which paged attention does not keep to", window
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind in _BY_LENGTH:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            yield f"turns its positions by the length of the batch beyond {original} tokens ({kind})", int(original)


def _window(config: Any) -> int | None:
    """Returns how many tokens some layer sees; None if all see all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the parameters of rotary embeddings; some models have several, by kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        nested = [parameter for parameter in parameters.values() if isinstance(parameter, Mapping)]
        yield from nested or [parameters]
