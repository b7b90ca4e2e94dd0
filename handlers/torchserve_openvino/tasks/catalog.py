"""The tasks that this package ships, as plain data: what they take and answer, and which models they are for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        handler: Name of its entrypoint.
        inputs: What a request holds.
        outputs: What it answers.
        hub: Name of the task in Hugging Face's documentation; empty for tasks without models of that kind.
        loader: The class of transformers that loads its models.
        heads: Endings of the architectures in ``config.json`` that this task is guessed from.
        modules: What has to be installed besides the base package, by import name.
        extra: The extra that installs it.
        template: The file in model-config/ that `init` and `package` start from.
        prepared_by: What turns inputs into tensors, or tensors into texts: ``tokenizer``, ``any_tokenizer``,
            ``image_processor``, ``feature_extractor``.
        may_lack: A submodule that the task can do without, if a model's folder has no weights for it.
        encoder_loader: The class that loads those of its models that have an encoder and a decoder, and so write text
            token by token; empty if there are none.
    """

    handler: str
    inputs: str
    outputs: str
    hub: str = ""
    loader: str = ""
    heads: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    extra: str = ""
    template: str = "cpu-latency"
    prepared_by: tuple[str, ...] = ()
    may_lack: str = ""
    encoder_loader: str = ""
    sparse_loader: str = ""


_TEXT: Mapping[str, Any] = {
    "modules": ("transformers", "tokenizers", "orjson"), "extra": "hf", "template": "text",
    "prepared_by": ("tokenizer",),
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "modules": ("transformers", "orjson"), "extra": "hf", "template": "vision", "prepared_by": ("image_processor",),
}  # fmt: skip
# Vision models without a head; any other `...Model` is taken for one of texts.
_VISION_MODELS = (
    "ViTModel", "DeiTModel", "BeitModel", "SwinModel", "Swinv2Model", "ConvNextModel", "ConvNextV2Model", "ResNetModel",
    "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel", "VisionModel", "VisionModelWithProjection",
)  # fmt: skip
_PICTURE_TEXT_MODELS = ("CLIPModel", "SiglipModel", "Siglip2Model", "AltCLIPModel")

_AUDIO: Mapping[str, Any] = {"modules": ("transformers", "soundfile", "soxr"), "extra": "audio", "template": "audio"}
_ALL = (
    Task("image_classifier", "a photo", "{label: probability}, most probable first"),
    Task("tensor", "tensors: JSON, .npy, KServe v2", "the model's outputs, in the same format"),
    Task(
        "text_classifier",
        "a text",
        "{label: probability}",
        "text-classification",
        "AutoModelForSequenceClassification",
        ("ForSequenceClassification",),
        **_TEXT,
    ),
    Task(
        "token_classifier",
        "a text",
        "[{entity_group, score, word, start, end}]",
        "token-classification",
        "AutoModelForTokenClassification",
        ("ForTokenClassification",),
        **_TEXT,
    ),
    Task(
        "question_answerer",
        "{question, context}",
        "{score, start, end, answer}",
        "question-answering",
        "AutoModelForQuestionAnswering",
        ("ForQuestionAnswering",),
        **_TEXT,
    ),
    Task(
        "fill_mask",
        "a text with the mask token",
        "[{score, token, token_str, sequence}]",
        "fill-mask",
        "AutoModelForMaskedLM",
        ("ForMaskedLM",),
        **_TEXT,
    ),
    Task(
        "hub_image_classifier",
        "a photo",
        "{label: probability}, most probable first",
        "image-classification",
        "AutoModelForImageClassification",
        ("ForImageClassification",),
        **_VISION,
    ),
    Task(
        "image_segmenter",
        "a photo",
        "[[[class, probability]]], or a label map as PNG",
        "image-segmentation",
        "AutoModelForSemanticSegmentation",
        ("ForSemanticSegmentation",),
        **_VISION,
    ),
    Task(
        "object_detector",
        "a photo",
        "[{label: [x1, y1, x2, y2], score}]",
        "object-detection",
        "AutoModelForObjectDetection",
        ("ForObjectDetection",),
        **_VISION,
    ),
    Task(
        "depth_estimator",
        "a photo",
        "{predicted_depth, depth, min, max}",
        "depth-estimation",
        "AutoModelForDepthEstimation",
        ("ForDepthEstimation",),
        **_VISION,
    ),
    Task(
        "zero_shot_image_classifier",
        "a photo and candidate_labels",
        "[{label, score}], best first",
        "zero-shot-image-classification",
        "AutoModelForZeroShotImageClassification",
        _PICTURE_TEXT_MODELS,
        modules=("transformers", "tokenizers"),
        extra="hf",
        template="vision",
        prepared_by=("any_tokenizer", "image_processor"),
    ),
    Task(
        "image_embedder",
        "a photo",
        "[numbers]",
        "image-feature-extraction",
        "AutoModel",
        _VISION_MODELS,
        # A classifier's folder has no pooler: it reads the CLS token itself, which is the vector then.
        may_lack="pooler",
        **_VISION,
    ),
    # Before sentence_embedder, which any other `...Model` is taken for.
    Task(
        "text_generator",
        "a prompt, or a chat",
        "{text, finish_reason, ...}, or OpenAI's form; whole or streamed",
        "text-generation",
        "AutoModelForCausalLM",
        ("ForCausalLM", "GPT2LMHeadModel"),
        modules=("transformers", "tokenizers", "jinja2", "openvino_genai"),
        extra="generate",
        template="text-generation",
        prepared_by=("tokenizer",),
        encoder_loader="AutoModelForSeq2SeqLM",
    ),
    Task(
        "sentence_embedder",
        "a text",
        "[numbers], or [{index, value}] of a sparse model",
        "sentence-similarity",
        "AutoModel",
        ("Model",),
        sparse_loader="AutoModelForMaskedLM",
        # Vectors are made of the tokens'.
        may_lack="pooler",
        **_TEXT,
    ),
    Task(
        "zero_shot_classifier",
        "a text and candidate_labels",
        "[{label, score}], most probable first",
        "zero-shot-classification",
        "AutoModelForSequenceClassification",
        **_TEXT,
    ),
    Task(
        "reranker",
        "{query, texts}",
        "[{index, score}], best first",
        "text-ranking",
        "AutoModelForSequenceClassification",
        **_TEXT,
    ),
    Task(
        "audio_classifier",
        "a recording: WAV, FLAC",
        "[{label, score}], best first",
        "audio-classification",
        "AutoModelForAudioClassification",
        # Most audio models have the text models' name of the head: `guessed` tells them apart.
        ("ForAudioClassification", "ForSequenceClassification"),
        **_AUDIO,
        prepared_by=("feature_extractor",),
    ),
    Task(
        "speech_recognizer",
        "a recording: WAV, FLAC",
        "{text, chunks}, or OpenAI's form",
        "automatic-speech-recognition",
        "AutoModelForCTC",
        ("ForCTC", "WhisperForConditionalGeneration"),
        **_AUDIO,
        prepared_by=("feature_extractor", "any_tokenizer"),
        encoder_loader="AutoModelForSpeechSeq2Seq",
    ),
    Task(
        "image_generator",
        "a prompt, and a picture to change",
        "PNG, or {created, data: [{b64_json, seed}]}",
        "text-to-image",
        "DiffusionPipeline",
        modules=("diffusers", "transformers", "tokenizers"),
        extra="diffusion",
        template="image-generation",
    ),
)

TASKS: Mapping[str, Task] = {task.handler: task for task in _ALL}

# Models of recordings, by ``model_type`` in ``config.json``.
AUDIO_MODELS = frozenset({
    "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d",
    "data2vec-audio", "audio-spectrogram-transformer", "whisper",
})  # fmt: skip

# Models with an encoder and a decoder of texts.
TEXT_TO_TEXT_MODELS = frozenset({
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "plbart", "led", "pegasus", "pegasus_x",
    "bigbird_pegasus", "marian", "m2m_100", "blenderbot", "blenderbot-small", "prophetnet", "fsmt",
})  # fmt: skip


@dataclass(frozen=True)
class Guess:
    """The task that a model's own files name.

    Attributes:
        task: The task; None if it can't be told.
        why: What it was told from, or why not.
    """

    task: Task | None
    why: str = field(default="")


def encodes(config: Mapping[str, Any]) -> bool:
    """Whether a model, by its ``config.json``, has an encoder and a decoder, and so writes text token by token."""
    known = config.get("model_type") in TEXT_TO_TEXT_MODELS | {"whisper"}
    return bool(config.get("is_encoder_decoder", known))


def named(name: str) -> Task | None:
    """Finds a task by its handler's name or by Hugging Face's name of the task."""
    plain = name.removesuffix(".py").replace("-", "_")
    known = {task.hub.replace("-", "_"): task for task in TASKS.values() if task.hub}
    return TASKS.get(plain) or known.get(plain) or known.get(_SYNONYMS.get(plain, ""))


# Other names by which transformers knows a task.
_SYNONYMS = {
    "sentiment_analysis": "text_classification",
    "ner": "token_classification",
    "asr": "automatic_speech_recognition",
    "feature_extraction": "sentence_similarity",
}


def loader_of(task: Task, config: Mapping[str, Any], *, sparse: bool = False) -> str:
    """Returns the class of transformers that loads a model for a task.

    Args:
        task: The task.
        config: Content of the model's ``config.json``.
        sparse: Whether the folder has a sparse encoder.
    """
    if sparse and task.sparse_loader:
        return task.sparse_loader
    for name in config.get("architectures") or []:
        # The class for the type of model in this place has no projection.
        if task.loader == "AutoModel" and str(name).endswith("VisionModelWithProjection"):
            return str(name)
    return task.encoder_loader if task.encoder_loader and encodes(config) else task.loader


def guessed(config: Mapping[str, Any], *, pools: bool = False) -> Guess:
    """Guesses a model's task from its ``config.json``.

    Args:
        config: Content of ``config.json``.
        pools: Whether the folder has sentence-transformers' modules.json, which says how tokens are pooled.
    """
    architectures = config.get("architectures") or []
    if not architectures:
        return Guess(None, "config.json names no architecture")
    name = str(architectures[0])
    if config.get("model_type") in AUDIO_MODELS:
        return _guessed_audio(name)
    if pools:
        return Guess(TASKS["sentence_embedder"], "modules.json")
    labels = {str(label).lower() for label in (config.get("id2label") or {}).values()}
    if name.endswith("ForSequenceClassification"):
        if any(label.startswith("entail") for label in labels):
            return Guess(TASKS["zero_shot_classifier"], "its label 'entailment'")
        if len(labels) == 1 or config.get("num_labels") == 1:
            return Guess(TASKS["reranker"], "its only label")
    if name.endswith(("ForConditionalGeneration", "MTModel")):
        return _guessed_conditional(name, config)
    for task in TASKS.values():
        if name.endswith(task.heads) and task.heads:
            return Guess(task, f"the architecture {name}")
    return Guess(None, f"no task of this package is known for the architecture {name}")


def _guessed_conditional(name: str, config: Mapping[str, Any]) -> Guess:
    """Guesses for a model with an encoder and a decoder; those of pictures and sounds have such names, too."""
    if config.get("model_type") in TEXT_TO_TEXT_MODELS:
        return Guess(TASKS["text_generator"], f"the architecture {name}")
    return Guess(None, f"no task of this package is known for the architecture {name}")


def _guessed_audio(name: str) -> Guess:
    """Guesses among the audio tasks, whose models' heads have the names of text models' heads."""
    audio_task = next((task for task in TASKS.values() if task.extra == "audio" and name.endswith(task.heads)), None)
    if audio_task is None:
        return Guess(None, f"no audio task is known for the architecture {name}")
    return Guess(audio_task, f"the architecture {name}")
