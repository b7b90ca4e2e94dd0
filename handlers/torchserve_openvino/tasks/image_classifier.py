"""Classifies photos, with answers in the format of TorchServe's own image_classifier."""

from collections.abc import Sequence
from typing import Any

import torch

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.loading.labels import labeled
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks import picture_transforms
from torchserve_openvino.tasks.items import ItemHandler, body

Answer = dict[str, float] | ItemError


class ImageClassifier(ItemHandler):
    """The ``top_k`` most probable classes of a photo, named by index_to_name.json if the archive has one."""

    # Pillow releases the GIL while it decodes and resizes.
    decodes_in_parallel = True

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1()

    def servable(self, model: Any) -> Any:
        """Returns the model; with ``fold``, the model with normalization and softmax in its graph."""
        section = self._openvino.config.openvino.image
        return picture_transforms.FoldedClassifier(model, section) if section.fold else model

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns one photo, unless the YAML declares inputs."""
        section = self._openvino.config.openvino.image
        if section.fold:
            return [WarmupInput(shape=[section.crop, section.crop, 3], dtype="uint8", low=0, high=256)]
        return self._openvino.config.openvino.warmup.inputs or [WarmupInput(shape=[3, section.crop, section.crop])]

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns a photo as the model's input."""
        return (self.decode({"body": body}).unsqueeze(0),), {}

    def warm_decoding(self) -> None:
        """Decodes photos."""
        picture_transforms.warm(self._openvino.config.openvino.image)

    def decode(self, item: Any) -> torch.Tensor:
        """Converts a request's picture with `images.to_tensor`."""
        return picture_transforms.to_tensor(body(item), self._openvino.config.openvino.image)

    def predict(self, values: list[torch.Tensor]) -> list[Answer]:
        """Returns ``{label: probability}`` for each picture, most probable first."""
        together = len(values) > 1 and (self._openvino.served is None or self._openvino.served.joins)
        batches = [torch.stack(values)] if together else [value.unsqueeze(0) for value in values]
        section = self._openvino.config.openvino.image
        with torch.inference_mode():
            outputs = [picture_transforms.logits_of(self.model(batch)) for batch in batches]
            scores = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            probabilities = scores if section.fold else torch.softmax(scores.float(), dim=1)
            top, classes = torch.topk(probabilities, min(section.top_k, scores.shape[1]), dim=1)
        answers: list[Answer] = [*labeled(top.tolist(), self.mapping, classes.tolist())]
        for index, row in enumerate(scores):
            try:
                self.check_finite([row])
            except ItemError as error:
                answers[index] = error
        return answers

    def run_eager(self, value: torch.Tensor) -> Any:
        """Runs the eager model on one picture."""
        return self._openvino.eager_model(value.unsqueeze(0))
