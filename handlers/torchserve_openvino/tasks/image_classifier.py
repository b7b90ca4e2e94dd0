"""Photos to class probabilities, answered as TorchServe's own image_classifier answers."""

from collections.abc import Sequence
from typing import Any

import torch
from ts.utils.util import map_class_to_label

from torchserve_openvino.config.sections import WarmupInput
from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.tasks import images
from torchserve_openvino.tasks.items import ItemHandler, body


class ImageClassifier(ItemHandler):
    """The ``top_k`` most probable classes of a photo, named by index_to_name.json where the archive has one."""

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """One photo, unless the YAML says otherwise."""
        crop = self.config.openvino.image.crop
        return self.config.openvino.warmup.inputs or [WarmupInput(shape=[3, crop, crop])]

    def decode(self, item: dict[str, Any]) -> torch.Tensor:
        """A request's picture as ``[3, crop, crop]`` float32."""
        return images.to_tensor(body(item), self.config.openvino.image)

    def predict(self, values: list[torch.Tensor]) -> list[dict[str, float] | InvalidInputError]:
        """``{label: probability}`` for each picture, most probable first."""
        with torch.inference_mode():
            logits = _logits(self.model(torch.stack(values).to(self.device)))
            top_k = min(self.config.openvino.image.top_k, logits.shape[1])
            probabilities, classes = torch.topk(torch.softmax(logits.float(), dim=1), top_k, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())


def _logits(output: Any) -> torch.Tensor:
    """The logits of a model that returns them bare, first in a tuple, or as a ``logits`` field."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return output[0]
