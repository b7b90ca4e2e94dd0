"""Turns photos into vectors."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchserve_openvino.serving.verification.measures import Cosine, Measure
from torchserve_openvino.tasks.arrays import Arrays
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.vision.vision_handler import Outputs, PreparedPicture, VisionHandler, VisionHead

logger = logging.getLogger(__name__)


class EmbedderParameters(Parameters):
    """Parameters of an image embedding."""

    normalize: bool = False
    """Whether the vector's length becomes 1."""


class EmbedderHead(VisionHead):
    """A vision model that returns one vector for each picture.

    The vector is the projected one of a model of pictures and texts (CLIP), otherwise the pooled output, otherwise the
    first token (CLS).
    """

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor | None = None) -> Outputs:
        """Returns the vectors, float32 ``[batch, width]``, for float32 ``[batch, 3, height, width]``."""
        features = getattr(self.model, "get_image_features", None)
        return self.outputs((features or self.model)(pixel_values=pixel_values))

    def outputs(self, output: Any) -> Outputs:
        """Returns the vectors."""
        pooled = getattr(output, "image_embeds", None)
        pooled = pooled if pooled is not None else getattr(output, "pooler_output", None)
        # Convolutional models pool to [batch, width, 1, 1].
        return (pooled.flatten(1) if pooled is not None else output.last_hidden_state[:, 0],)


class ImageEmbedder(VisionHandler):
    """The vector of a photo."""

    task = "image_embedder"
    parameters = EmbedderParameters
    answers = list[float]
    head = EmbedderHead

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Cosine()

    def load_model(self, folder: Path) -> nn.Module:
        """Loads the model; a pooler that was not trained is left out."""
        model = super().load_model(folder)
        if getattr(model, "pooler", True) is None:
            logger.info("%s has no trained pooler: vectors are the CLS token", folder.name)
        return model

    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> Arrays:
        """Returns the numbers of the vector."""
        vector = outputs[0].float()
        if picture.part.parameters.normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return Arrays(vector)
