"""Makes the configuration of a published architecture small: few layers, a small vocabulary, heads of a chosen size.

The rules go by the names of fields, which transformers' configurations share; `overrides` has what they do not reach.
Sizes that do not depend on heads (channels of convolutions, kernels, strides, windows) stay as published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from model_zoo.grid import Case
from model_zoo.overrides import FIELDS

VOCABULARY = 512
# Special tokens are below this; drawn tokens are not, so that none of them is padding or marks a picture.
FIRST_TOKEN = 32
_HEADS = 2
_LAYERS = 2
_POSITIONS = 520
PATCHES_PER_SIDE = {1: 2, 33: 6, 64: 8, 257: 16}

_WIDTHS = frozenset(
    "hidden_size d_model n_embd emb_dim encoder_hidden_size decoder_hidden_size output_hidden_size "
    "out_hidden_size text_hidden_size model_dim dim width projector_hidden_size cross_attention_hidden_size "
    "thinker_hidden_size query_dim reassemble_hidden_size".split()
)
_HEAD_COUNTS = tuple(
    "num_attention_heads n_head n_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads decoder_num_attention_heads "
    "encoder_num_attention_heads swa_num_attention_heads speech_encoder_attention_heads "
    "t2u_encoder_attention_heads t2u_decoder_attention_heads decoder_self_attention_heads "
    "decoder_cross_attention_heads".split()
)
_KEY_VALUE_HEADS = frozenset(
    "num_key_value_heads n_kv_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads".split()
)
_HEAD_SIZES = frozenset(
    "head_dim d_kv v_head_dim swa_head_dim attention_head_dim global_head_dim dim_head resampler_head_dim".split()
)
_INNER = frozenset(
    "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner moe_intermediate_size mlp_dim "
    "ffn_hidden_size shared_expert_intermediate_size decoder_intermediate_size shared_intermediate_size "
    "intermediate_dim moe_shared_expert_intermediate_size decoder_mlp_dim expert_ffn_hidden_size "
    "speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim dim_feedforward "
    "encoder_feedforward_dim intermediate_size_mlp".split()
)
_LAYER_COUNTS = tuple(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers depth decoder_num_layers num_blocks "
    "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers resampler_depth".split()
)
_EXPERTS = frozenset("num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts".split())
_AT_MOST_2 = frozenset("num_experts_per_tok moe_topk moe_k top_k_experts experts_per_token moe_top_k topk".split())
_AT_MOST_1 = frozenset(
    "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers "
    "moe_num_shared_experts num_kv_shared_layers num_mtp_layers num_nextn_predict_layers max_window_layers "
    "moe_layer_start_index".split()
)
_POSITION_COUNTS = frozenset(
    "max_position_embeddings n_positions max_seq_len max_sequence_length context_length max_seq_length "
    "max_target_positions seq_length".split()
)
_VOCABULARIES = frozenset(
    "vocab_size_per_layer_input vocab_size decoder_vocab_size text_vocab_size char_vocab_size t2u_vocab_size".split()
)


def small_values(config: Any, case: Case, model_type: str = "") -> dict[str, Any]:
    """Returns arguments of a configuration's class that make it small.

    Args:
        config: The published (default) configuration.
        case: For the size of heads, and of pictures and recordings.
        model_type: Type of the model that the configuration belongs to; its overrides apply to this part alone.

    Returns:
        Only fields that differ; parts of a composite configuration as configurations.
    """
    overrides = FIELDS.get(model_type or config.model_type, {})
    overrides = overrides(case) if callable(overrides) else overrides
    fields = {field.name: _value(config, field.name) for field in dataclasses.fields(config)}
    values = _not_default(config, fields)
    layers = _kept_layers(fields)
    for name, value in fields.items():
        if name in overrides:
            continue
        if hasattr(value, "to_dict") and dataclasses.is_dataclass(value):
            values[name] = small(value, case)
        elif layers and _is_by_layer(name, value, layers.published):
            values[name] = [value[i] for i in layers.kept]
        elif (changed := _small_value(name, value, fields, case, layers)) is not None:
            values[name] = changed
    handed = list(fields.get("_out_features") or ())
    if layers and len(handed) > 1 and "depths" not in fields:
        handed = [f"stage{number + 1}" for number in range(len(layers.kept))][-len(handed) :]
    if len(handed) > 1:
        values["out_features"] = handed
    return {**values, **overrides}


def _not_default(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a composite configuration sets in its part."""
    default = type(config)()
    return {
        name: value
        for name, value in fields.items()
        if not name.startswith("_") and not hasattr(value, "to_dict") and value not in (None, _value(default, name))
    }


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:
        # The layers differ in this field, which `per_layer_config` has then.
        return None


def small(config: Any, case: Case, model_type: str = "") -> Any:
    """Returns a small configuration of the same class; arguments as in `small_values`."""
    return type(config)(**small_values(config, case, model_type))


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that a small model keeps: one of each kind, and at least two."""

    published: int
    kept: tuple[int, ...]


def _kept_layers(fields: Mapping[str, Any]) -> _Layers | None:
    # The most important name of a field comes first.
    published = next((fields[name] for name in _LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    if not published:
        return None
    lists = [value for name, value in fields.items() if _is_by_layer(name, value, published)]
    firsts: dict[tuple[str, ...], int] = {}
    for position in range(published):
        firsts.setdefault(tuple(repr(value[position]) for value in lists), position)
    kept = sorted(firsts.values())[:4]
    # A backbone hands over several of its layers.
    least = max(_LAYERS, len(fields.get("_out_features") or ()))
    kept += [position for position in range(published) if position not in kept][: max(0, least - len(kept))]
    return _Layers(published, tuple(sorted(kept)))


def _is_by_layer(name: str, value: Any, published: int) -> bool:
    """Whether a field has an item for each layer."""
    named = any(part in name for part in ("layer", "types", "block", "pattern"))
    return named and isinstance(value, list | tuple) and len(value) == published and published > _LAYERS


def _small_value(name: str, value: Any, fields: Mapping[str, Any], case: Case, layers: _Layers | None) -> Any:
    """Returns the new value of a field, or None to leave it."""
    if isinstance(value, dict) and name in {"rope_parameters", "rope_scaling"}:
        return _small_rope(value, case.head)
    if name.endswith(("token_id", "token_index")) or name in {"pad_id", "mask_index", "unk_index"}:
        return _small_token(name, value)
    if name in {"image_size", "img_size", "input_size"}:
        return _image_size(value, fields, case)
    if value is None:
        # Published without a default.
        missing = {"vocab_size": VOCABULARY, "head_dim": case.head, "n_shared_experts": 1}
        return missing.get(name, 4 if name in _EXPERTS else 2 if name in _AT_MOST_2 else None)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    width = _HEADS * case.head
    if name in _WIDTHS:
        return width
    if name in _HEAD_COUNTS:
        return _HEADS
    if name in _KEY_VALUE_HEADS:
        heads = next((fields[count] for count in _HEAD_COUNTS if isinstance(fields.get(count), int)), None)
        return 1 if heads is not None and value < heads else _HEADS
    if name in _HEAD_SIZES:
        return case.head
    if name == "qk_rope_head_dim":
        return 32
    if name == "qk_nope_head_dim":
        return case.head - 32 if fields.get("qk_rope_head_dim") else case.head
    if name == "num_heads":
        return _HEADS
    if name in _INNER:
        return 2 * width
    if name in _LAYER_COUNTS:
        return len(layers.kept) if layers and value == layers.published else min(value, _LAYERS)
    limits = {
        **dict.fromkeys(_EXPERTS, 4), **dict.fromkeys(_AT_MOST_2, 2), **dict.fromkeys(_AT_MOST_1, 1),
        **dict.fromkeys(_POSITION_COUNTS, _POSITIONS), **dict.fromkeys(_VOCABULARIES, VOCABULARY),
        "kv_lora_rank": 64, "q_lora_rank": 96, "rotary_dim": case.head, "max_source_positions": max(case.length, 4),
        "num_queries": 20, "num_mel_bins": 80, "num_codebooks": 2, "index_n_heads": 2, "embedding_size": width,
        "projection_dim": 64, "sliding_window": 48,
    }  # fmt: skip
    if name in limits:
        return min(value, limits[name])
    return None


def _small_token(name: str, value: Any) -> Any:
    """Special tokens have numbers of their own below `FIRST_TOKEN`."""
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [known.get(name, 3)]
    if not isinstance(value, int) or value < 0:
        return None
    return known.get(name, 4 + sum(map(ord, name)) % (FIRST_TOKEN - 4))


def _small_rope(value: dict[str, Any], head: int) -> dict[str, Any]:
    """Sections of multimodal rotary positions divide half a head among time, height and width."""
    changed = {key: _small_rope(item, head) if isinstance(item, dict) else item for key, item in value.items()}
    if "rope_theta" in changed and changed["rope_theta"] is None:
        changed["rope_theta"] = 10_000.0
    if section := changed.get("mrope_section"):
        half = int(head * changed.get("partial_rotary_factor", 1.0)) // 2
        rest = [half * part // sum(section) for part in section[1:]]
        changed["mrope_section"] = [half - sum(rest), *rest]
    return changed


def patch_of(fields: Mapping[str, Any]) -> int:
    """Returns the size of a patch in pixels; 16 where an architecture has none."""
    patch = next((fields[name] for name in ("patch_size", "patch_stride") if fields.get(name)), 16)
    if isinstance(patch, list | tuple):
        patch = next((item for item in patch[::-1] if isinstance(item, int)), 16)
    return patch if isinstance(patch, int) else 16


def _image_size(value: Any, fields: Mapping[str, Any], case: Case) -> Any:
    # Patches of 4 pixels are merged to 32 by the stages of a hierarchical model.
    patch = patch_of(fields)
    side = image_side(patch, case.length)
    if isinstance(value, list | tuple):
        return [side] * len(value)
    return side if isinstance(value, int) and value else None


def image_side(patch: int, length: int) -> int:
    """Returns the side of a square picture with about as many patches as ``length``."""
    return (patch if patch >= 8 else 16) * PATCHES_PER_SIDE[length]
