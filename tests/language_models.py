"""Tiny language models with random weights, one of each architecture that the engines are tested with."""

from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 96
EOS = 2
_USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
# Of the fields above, those that an architecture names differently or lacks, and its own.
_CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 256},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "phi": {"partial_rotary_factor": 0.5},
    # Every other layer sees 16 tokens; scores are limited.
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
}
_CLASSES = {
    "gpt2": "GPT2", "opt": "OPT", "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "gemma": "Gemma",
    "phi": "Phi",
}  # fmt: skip
# For OpenVINO GenAI; it takes none of the others.
KINDS = tuple(_CLASSES)
_CLASSES |= {"gemma2": "Gemma2", "bloom": "Bloom"}
# Each takes seconds: the quick suite has one with learned positions, and one with rotated ones and shared heads.
each_kind = pytest.mark.parametrize(
    "kind", [kind if kind in {"gpt2", "llama"} else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
_RENAMED = {
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "opt": ("intermediate_size", "initializer_range"),
    "bloom": ("intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
}


def tiny(kind: str, **changes: Any) -> Any:
    """Returns a model in evaluation mode; the same weights at each call."""
    import transformers

    fields = {name: value for name, value in _USUAL.items() if name not in _RENAMED.get(kind, ())}
    config = getattr(transformers, f"{_CLASSES[kind]}Config")(**{**fields, **_CHANGES[kind], **changes})
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if kind == "gpt2" else f"{_CLASSES[kind]}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def seq2seq(kind: str, **changes: Any) -> Any:
    """Returns a model with an encoder and a decoder, in evaluation mode; the same weights at each call."""
    import transformers

    common = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": 0}
    if kind == "t5":
        common |= {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0}
        config: Any = transformers.T5Config(**{**common, "decoder_start_token_id": 0, **changes})
        kind = "T5"
    else:
        common |= {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                   "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3,
                   "max_position_embeddings": 64}  # fmt: skip
        tokens = {"bos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
        config = transformers.BartConfig(**{**common, **tokens, **changes})
        kind = "Bart"
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def saved(folder: Path, kind: str, **changes: Any) -> Any:
    """Saves a tiny model as `save_pretrained` does, and returns it."""
    model = tiny(kind, **changes)
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' own ``generate`` gives, without an end."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    ids = torch.tensor([prompt])
    # Without a mask, transformers takes token 0 of a prompt for padding.
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, eos_token_id=None)
    return found[0, len(prompt) :].tolist()


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
