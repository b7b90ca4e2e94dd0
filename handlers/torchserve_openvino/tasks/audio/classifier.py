"""Classifies recordings, with answers in the format of Hugging Face's inference API."""

from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.errors import NonFiniteOutputError
from torchserve_openvino.serving.verification.measures import Measure
from torchserve_openvino.tasks.audio.audio_handler import AudioHandler, Recording
from torchserve_openvino.tasks.forms import Scored
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import measure_of


class AudioParameters(Parameters):
    """Parameters of an audio classification."""

    top_k: Annotated[int, Field(ge=1)] = 5
    """How many labels to return, best first."""


class AudioClassifier(AudioHandler):
    """The labels of a recording with their scores, best first."""

    task = "audio_classifier"
    parameters = AudioParameters
    answers = list[Scored]

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return measure_of(self._openvino.eager_model.model.config)

    def answer(self, recording: Recording, logits: torch.Tensor) -> list[dict[str, Any]]:
        """Returns ``[{label, score}]``; scores are what transformers' pipeline makes of the logits."""
        if bool(logits.isnan().any()):
            raise NonFiniteOutputError("the model's scores are not numbers for this recording")
        kind = self._openvino.eager_model.model.config.problem_type
        probabilities = logits.float()
        if kind != "regression":
            many = kind == "multi_label_classification"
            probabilities = torch.sigmoid(probabilities) if many else torch.softmax(probabilities, dim=-1)
        scores, labels = probabilities.topk(min(recording.part.parameters.top_k, len(probabilities)))
        return [
            {"label": self.label(number), "score": score}
            for score, number in zip(scores.tolist(), labels.tolist(), strict=True)
        ]
