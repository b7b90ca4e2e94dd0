"""What this package uses of transformers' Whisper that is not public; tests/contract/test_whisper.py pins it."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def pipeline_text(
    tokenizer: Any, tokens: Sequence[int], timestamps: bool, precision: float
) -> tuple[str, list[dict[str, Any]] | None]:
    """Returns text and chunks as transformers' pipeline for speech recognition does.

    Args:
        tokenizer: A Whisper tokenizer.
        tokens: What the model wrote, with its tokens for times.
        timestamps: Whether to return chunks.
        precision: Seconds between two tokens for times.
    """
    outputs = [{"tokens": np.array([tokens], dtype=np.int64)}]
    text, optional = tokenizer._decode_asr(
        outputs, return_timestamps=timestamps or None, return_language=None, time_precision=precision
    )
    chunks = optional.get("chunks")
    if chunks is None:
        return text, None
    return text, [{**chunk, "timestamp": list(chunk["timestamp"])} for chunk in chunks]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a prompt, with the token that begins prompts.

    Raises:
        ValueError: It holds a special token.
    """
    return [int(token) for token in tokenizer.get_prompt_ids(text)]


def language_names() -> dict[str, str]:
    """Returns English names of languages by their codes."""
    # Imported here: it takes seconds, which only workers of models of transformers need.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)
