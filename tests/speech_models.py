"""Tiny Whisper models with random weights, saved as `save_pretrained` does, with a tokenizer made here."""

from pathlib import Path
from typing import Any

import torch

# What the model hears at once, in seconds; Whisper's own is 30.
WINDOW = 2
_TEXT = " abcdefghijklmnopqrstuvwxyz.,"
_LANGUAGES = ("en", "de", "fr")
_SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in _LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


def tokenizer(window: int = WINDOW) -> Any:
    """Letters, then Whisper's special tokens in its order, then a token for each 20 ms."""
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer

    # In byte-level vocabularies, a space has another letter.
    letters = {letter.replace(" ", "Ġ"): number for number, letter in enumerate(_TEXT)}
    found = WhisperTokenizer(vocab={**letters, _SPECIAL[0]: len(letters)}, merges=[], pad_token=_SPECIAL[0])
    found.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    times = [f"<|{number * 0.02:.2f}|>" for number in range(window * 50 + 1)]
    found.add_tokens([AddedToken(text, special=False, normalized=False) for text in times])
    return found


def whisper(
    folder: Path,
    *,
    multilingual: bool = True,
    timed: bool = True,
    window: int = WINDOW,
    half: bool = False,
    **changes: Any,
) -> Path:
    """Saves a model, its feature extractor, tokenizer and settings.

    Args:
        folder: Where to.
        multilingual: Whether it knows several languages and tasks.
        timed: Whether its settings name the tokens for times.
        window: What it hears at once, in seconds.
        half: Whether its weights have 16 bits.
        changes: Of its settings for generation.
    """
    import transformers

    words = tokenizer(window)
    numbers = {name: words.convert_tokens_to_ids(name) for name in _SPECIAL}
    end = numbers["<|endoftext|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(words), num_mel_bins=20, d_model=16, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_source_positions=window * 50, max_target_positions=40, init_std=0.5, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=numbers["<|startoftranscript|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    settings = {
        "max_length": 40, "pad_token_id": end, "bos_token_id": end, "eos_token_id": end,
        "decoder_start_token_id": config.decoder_start_token_id, "prev_sot_token_id": numbers["<|startofprev|>"],
        "suppress_tokens": [3, 4, *(numbers[name] for name in _SPECIAL[1:-1])], "begin_suppress_tokens": [0, end],
        "is_multilingual": multilingual, "max_initial_timestamp_index": 10,
    }  # fmt: skip
    if timed:
        settings["no_timestamps_token_id"] = numbers["<|notimestamps|>"]
    if multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": numbers[f"<|{code}|>"] for code in _LANGUAGES}
        settings["task_to_id"] = {name: numbers[f"<|{name}|>"] for name in ("transcribe", "translate")}
    model.generation_config = transformers.GenerationConfig(**settings | changes)
    (model.half() if half else model).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=window).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
