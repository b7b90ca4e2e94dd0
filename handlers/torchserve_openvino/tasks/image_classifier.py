"""Photos to class probabilities, answered as TorchServe's own image_classifier answers."""

from collections.abc import Sequence
from typing import Any

import torch
from ts.utils.util import map_class_to_label

from torchserve_openvino.config.sections import WarmupInput
from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.inputs import Inputs
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.tasks import images
from torchserve_openvino.tasks.items import ItemHandler, body

Answer = dict[str, float] | ItemError


class ImageClassifier(ItemHandler):
    """The ``top_k`` most probable classes of a photo, named by index_to_name.json where the archive has one."""

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """One photo, unless the YAML says otherwise."""
        crop = self.config.openvino.image.crop
        return self.config.openvino.warmup.inputs or [WarmupInput(shape=[3, crop, crop])]

    def sample_inputs(self, body: bytes) -> Inputs:
        """A photo as the model gets it."""
        return (self.decode({"body": body}).unsqueeze(0),), {}

    def decode(self, item: Any) -> torch.Tensor:
        """A request's picture as ``[3, crop, crop]`` float32."""
        return images.to_tensor(body(item), self.config.openvino.image)

    def predict(self, values: list[torch.Tensor]) -> list[Answer]:
        """``{label: probability}`` for each picture, most probable first."""
        together = not isinstance(self.model, ServedModel) or self.model.joins
        batches = [torch.stack(values)] if together else [value.unsqueeze(0) for value in values]
        with torch.inference_mode():
            logits = torch.cat([_logits(self.model(batch.to(self.device))) for batch in batches])
            top_k = min(self.config.openvino.image.top_k, logits.shape[1])
            probabilities, classes = torch.topk(torch.softmax(logits.float(), dim=1), top_k, dim=1)
        answers: list[Answer] = map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
        for index, row in enumerate(logits):
            try:
                self.check_finite([row])
            except ItemError as error:
                answers[index] = error
        return answers

    def run_eager(self, value: torch.Tensor) -> Any:
        """The eager model on one picture."""
        return self.eager_model(value.unsqueeze(0))


def _logits(output: Any) -> torch.Tensor:
    """The logits of a model that returns them bare, first in a tuple, or as a ``logits`` field."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return output[0]
