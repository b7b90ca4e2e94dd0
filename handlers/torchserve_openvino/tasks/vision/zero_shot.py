"""Says which of the request's own labels fits a photo, with a model of pictures and texts such as CLIP."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import InvalidInputError, ModelLoadError, PayloadTooLargeError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.observation.observe import Seen
from torchserve_openvino.serving.verification.measures import Measure, Similarities
from torchserve_openvino.tasks.forms import Scored
from torchserve_openvino.tasks.hub_handler import RequestInput, sentence_characters
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import probabilities
from torchserve_openvino.tasks.vision.vision_handler import Outputs, PreparedPicture, VisionHandler, VisionHead

_MOST_LABELS = 256
# Requests repeat their labels; the vectors of this many texts are kept.
_KEPT_TEXTS = 1024


# What pictures and texts are compared with in a narrower precision: some are close to each other, as users' labels are.
_REFERENCES = tuple(
    f"This is a photo of {label}."
    for label in (
        "a cat",
        "a dog",
        "a car",
        "a truck",
        "a person",
        "food",
        "a building",
        "a landscape",
        "text",
        "nothing",
    )
)


class ZeroShotParameters(Parameters):
    """Parameters of a zero-shot image classification, as in Hugging Face's inference API."""

    candidate_labels: Annotated[list[str], Field(min_length=1)]
    """The labels to choose from."""
    hypothesis_template: str = "This is a photo of {}."
    """The sentence that a label is put into, in place of `{}`."""


class PictureTower(VisionHead):
    """The half of the model that turns pictures into vectors of length 1."""

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor | None = None) -> Outputs:
        """Returns the vectors, float32 ``[batch, width]``, for float32 ``[batch, 3, height, width]``."""
        model: Any = self.model
        return (_of_length_one(model.get_image_features(pixel_values=pixel_values)),)


class TextTower(nn.Module):
    """The half of the model that turns texts into vectors of length 1.

    Args:
        model: The model.
        takes_mask: Whether it takes ``attention_mask``.
    """

    def __init__(self, model: nn.Module, takes_mask: bool) -> None:
        super().__init__()
        self.model = model
        self._takes_mask = takes_mask
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the vectors, float32 ``[batch, width]``, for int64 ``[batch, sequence]``."""
        model: Any = self.model
        mask = {"attention_mask": attention_mask} if self._takes_mask else {}
        return _of_length_one(model.get_text_features(input_ids=input_ids, **mask))


class ZeroShotImageClassifier(VisionHandler):
    """The candidate labels of a photo with their scores, best first.

    Attributes:
        texts: The model's half for texts, compiled beside ``model``, its half for pictures.
    """

    task = "zero_shot_image_classifier"
    parameters = ZeroShotParameters
    answers = list[Scored]
    head = PictureTower
    # For texts.
    needs_f32 = True
    example: ClassVar[Mapping[str, Any]] = {"candidate_labels": ["one", "two"]}

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self.texts: Any = None
        self._length = 0
        self._is_siglip = False
        self._scale, self._bias = 1.0, 0.0
        self._vectors: OrderedDict[str, torch.Tensor] = OrderedDict()

    def load(self, folder: Path) -> nn.Module:
        """Loads model, image processor and tokenizer.

        Raises:
            ModelLoadError: The model has no two halves, or the YAML wants the memory of one freed.
        """
        model: Any = super().load(folder)
        if not all(hasattr(model, name) for name in ("get_image_features", "get_text_features", "logit_scale")):
            raise ModelLoadError(
                f"{type(model).__name__} does not compare vectors of pictures and texts, as CLIP does."
            )
        if self._openvino.config.openvino.release_weights:
            raise ModelLoadError(
                "handler.openvino.release_weights: true is not possible here: two graphs share weights."
            )
        self.tokenizer = hub.load_tokenizer(folder, fast=False)
        self._length = int(self.model_config.text_config.max_position_embeddings)
        self._is_siglip = "siglip" in self.model_config.model_type
        self._scale = model.logit_scale.exp().item()
        self._bias = model.logit_bias.item() if hasattr(model, "logit_bias") else 0.0
        self.texts = TextTower(model, "attention_mask" in self._names)
        return model

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet: probabilities of some labels."""
        # Before READY, the vectors come from eager PyTorch.
        return Similarities(
            references=self._embedded(_REFERENCES), scale=self._scale, bias=self._bias, independent=self._is_siglip
        )

    @property
    def _names(self) -> list[str]:
        """The text tower's inputs; SigLIP's tokenizer makes no mask, as the model reads padding as text."""
        return [name for name in ("input_ids", "attention_mask") if name in self.tokenizer.model_input_names]

    def _seen(self, samples: Any, sizes: Any) -> Seen:
        """Adds the text tower to what is compiled before READY."""
        seen = super()._seen(samples, sizes)
        # What the trial before compilation computed is eager PyTorch's.
        self._vectors.clear()
        words = int(self.model_config.text_config.vocab_size)
        ids: dict[str, Any] = {"low": 0, "high": words}
        mask: dict[str, Any] = {"mask": True}
        known = {"input_ids": ids, "attention_mask": mask}
        seen.parts["texts"] = self.texts
        seen.measures["texts"] = self.measure()
        seen.declared["texts"] = [
            WarmupInput(name=name, shape=[self._length], dtype="int64", **known[name]) for name in self._names
        ]
        return seen

    def characters(self, part: RequestInput) -> int:
        """Returns the characters of the sentence for each label."""
        return sentence_characters(part.parameters.candidate_labels, part.parameters.hypothesis_template)

    def facts(self, part: RequestInput) -> list[str]:
        """Returns a sentence for each label, if the request's labels and template can be used.

        Raises:
            InvalidInputError: They can't.
            PayloadTooLargeError: There are too many labels.
        """
        labels, template = part.parameters.candidate_labels, part.parameters.hypothesis_template
        if len(labels) > _MOST_LABELS:
            raise PayloadTooLargeError(f"{len(labels)} candidate_labels; the most is {_MOST_LABELS}")
        if any(not label.strip() for label in labels):
            raise InvalidInputError("candidate_labels has an empty label")
        if "{}" not in template:
            raise InvalidInputError(f"hypothesis_template {template!r} has no {{}}, where the label goes")
        # No format string: it would come from the request.
        sentences = [template.replace("{}", label) for label in labels]
        if not self._is_siglip:
            for sentence, ids in zip(sentences, self.tokenizer(sentences)["input_ids"], strict=True):
                if len(ids) > self._length:
                    raise InvalidInputError(
                        f"{sentence[:40]!r}... has {len(ids)} tokens; this model takes {self._length}"
                    )
        return sentences

    def predict(self, values: list[PreparedPicture]) -> list[Any]:
        """Computes the vectors of new labels, then answers the pictures."""
        self._learn([sentence for value in values for sentence in value.facts])
        answers = super().predict(values)
        while len(self._vectors) > _KEPT_TEXTS:
            self._vectors.popitem(last=False)
        return answers

    def _learn(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            if sentence in self._vectors:
                self._vectors.move_to_end(sentence)
        new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self._vectors]
        if not new:
            return
        self._vectors.update(zip(new, self._embedded(new).unbind(), strict=True))

    def _embedded(self, sentences: Sequence[str]) -> torch.Tensor:
        """Returns the vectors of sentences, ``[sentences, width]``."""
        tokens = self.tokenizer(
            list(sentences), padding="max_length", max_length=self._length, truncation=self._is_siglip,
            return_tensors="pt",
        )  # fmt: skip
        with torch.inference_mode():
            vectors: torch.Tensor = self.texts(**{name: tokens[name] for name in self._names})
        return vectors

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Returns ``[{label, score}]``, best first."""
        if any(sentence not in self._vectors for sentence in picture.facts):
            self._learn(picture.facts)
        texts = torch.stack([self._vectors[sentence] for sentence in picture.facts])
        logits = texts @ outputs[0] * self._scale + self._bias
        if self._is_siglip:
            scores = torch.sigmoid(logits).tolist()
        else:
            scores = probabilities(logits)
        pairs = zip(picture.part.parameters.candidate_labels, scores, strict=True)
        return [{"label": label, "score": score} for label, score in sorted(pairs, key=lambda pair: -pair[1])]


def _of_length_one(output: Any) -> torch.Tensor:
    vectors = output if isinstance(output, torch.Tensor) else output.pooler_output
    return vectors / vectors.norm(p=2, dim=-1, keepdim=True)
