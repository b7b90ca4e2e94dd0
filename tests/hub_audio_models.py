"""Small audio models with random weights, saved as `save_pretrained` does, and recordings for them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

RATE = 16_000
LABELS = ["yes", "no", "up", "down", "left", "right"]
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOP"]


def recording(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """A few tones that change, with noise: float32 ``[samples]``."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    pitch = generator.uniform(100, 900, size=8)[(time * 8).astype(int) % 8]
    tones = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / rate)
    return (tones + 0.05 * generator.standard_normal(len(time))).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """An audio file; the samples are ``[samples]`` or ``[samples, channels]``."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def wav2vec2_config(norm: str = "layer", **changes: Any) -> Any:
    from transformers import Wav2Vec2Config

    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
        "conv_dim": (16, 16, 16), "conv_kernel": (10, 4, 4), "conv_stride": (8, 4, 4), "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
        "vocab_size": len(LETTERS), "pad_token_id": 0, "id2label": dict(enumerate(LABELS)),
        "label2id": {label: number for number, label in enumerate(LABELS)},
    }  # fmt: skip
    return Wav2Vec2Config(feat_extract_norm=norm, do_stable_layer_norm=norm == "layer", **{**sizes, **changes})


def lively(model: Any) -> Any:
    """Returns a model whose scores differ enough to have an order."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.mul_(6)
    return model.eval()


def audio_model(kind: str, folder: Path, *, norm: str = "layer", masks: bool | None = None, **changes: Any) -> Path:
    """Saves a model.

    Args:
        kind: Name of its class in transformers.
        folder: Where to.
        norm: ``layer`` for a model that takes a mask, ``group`` for one without.
        masks: Whether the feature extractor returns a mask; by default, where the model takes one.
    """
    import transformers

    torch.manual_seed(0)
    if kind == "ASTForAudioClassification":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        config = transformers.ASTConfig(
            max_length=64, num_mel_bins=32, id2label=dict(enumerate(LABELS)), **sizes, **changes
        )
        extractor = transformers.ASTFeatureExtractor(max_length=64, num_mel_bins=32)
    else:
        config = wav2vec2_config(norm, **changes)
        mask = norm == "layer" if masks is None else masks
        extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=mask, do_normalize=True)
    lively(getattr(transformers, kind)(config)).save_pretrained(folder)
    extractor.save_pretrained(folder)
    if kind.endswith("ForCTC"):
        vocabulary = folder / "vocab.json"
        vocabulary.write_text(json.dumps({letter: number for number, letter in enumerate(LETTERS)}))
        transformers.Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(folder)
    return folder
