"""Classifies texts by labels that each request brings, with a model of natural language inference."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.errors import InvalidInputError, ModelLoadError
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.forms import Scored
from torchserve_openvino.tasks.hub_handler import RequestInput, sentence_characters
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.scores import probabilities
from torchserve_openvino.tasks.text.text_handler import Outputs, TextHandler, TokenizedInput


class ZeroShotParameters(Parameters):
    """Parameters of a zero-shot classification, as in Hugging Face's inference API."""

    candidate_labels: Annotated[list[str], Field(min_length=1)]
    """The labels to choose from."""
    hypothesis_template: str = "This example is {}."
    """The sentence that a label is put into, in place of `{}`."""
    multi_label: bool = False
    """Whether several labels may be true; each is scored by itself then."""


class ZeroShotClassifier(TextHandler):
    """The candidate labels of a text with their scores, best first."""

    task = "zero_shot_classifier"
    parameters = ZeroShotParameters
    answers = list[Scored]

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1()

    def read_archive(self) -> None:
        """Loads the model, which has to know the label 'entailment'.

        Raises:
            ModelLoadError: It does not.
        """
        super().read_archive()
        self._entails = self._entailment()

    def _entailment(self) -> int:
        for number, label in sorted(self.labels.items()):
            if label.lower().startswith("entail"):
                return number
        raise ModelLoadError(
            f"{type(self.model).__name__} has no label 'entailment' ({', '.join(self.labels.values())}): zero-shot "
            "classification needs a model of natural language inference."
        )

    def texts(self, part: RequestInput) -> tuple[list[str], list[str] | None, Any]:
        """Returns the text with a sentence for each label."""
        parameters = part.parameters
        return (
            [part.input] * len(parameters.candidate_labels),
            # No format string: it would come from the request.
            [parameters.hypothesis_template.replace("{}", label) for label in parameters.candidate_labels],
            None,
        )

    def characters(self, part: RequestInput) -> int:
        """Returns the characters of the text and of a sentence, for each label."""
        labels = part.parameters.candidate_labels
        text = len(part.input) if isinstance(part.input, str) else 0
        return len(labels) * text + sentence_characters(labels, part.parameters.hypothesis_template)

    def read(self, part: RequestInput) -> str:
        """Returns the text, if the request's labels and template can be used."""
        labels, template = part.parameters.candidate_labels, part.parameters.hypothesis_template
        self.refuse_too_many(len(labels), "candidate_labels")
        if any(not label.strip() for label in labels):
            raise InvalidInputError("candidate_labels has an empty label")
        if "{}" not in template:
            raise InvalidInputError(f"hypothesis_template {template!r} has no {{}}, where the label goes")
        return str(super().read(part))

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> list[dict[str, Any]]:
        """Returns ``[{label, score}]``, best first."""
        parameters = tokenized.part.parameters
        logits = torch.stack([output[0].float() for output in outputs])
        if parameters.multi_label or len(parameters.candidate_labels) == 1:
            # As in transformers: against the contradiction, which is the last label or the first.
            against = -1 if self._entails == 0 else 0
            scores = [row[1] for row in probabilities(logits[:, [against, self._entails]])]  # type: ignore[index]
        else:
            scores = probabilities(logits[:, self._entails])
        pairs = zip(parameters.candidate_labels, scores, strict=True)
        return [{"label": label, "score": score} for label, score in sorted(pairs, key=lambda pair: -pair[1])]
