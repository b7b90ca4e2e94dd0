"""The baseline: a handler as users write it by hand. The archiver packs this one file.

Only the pre-processing is torchserve_openvino's, so that all contenders see the same pixels.
"""

import logging
import os

import torch
from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import map_class_to_label

from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.tasks.picture_transforms import to_tensor

logger = logging.getLogger(__name__)
IMAGE = ImageSection()


class PlainClassifier(BaseHandler):
    """Photos in, ``{label: probability}`` of the five most probable classes out."""

    def initialize(self, context: Context) -> None:
        """Loads as BaseHandler does, with the tuning that ours does by itself.

        A tuned worker's threads are its share of the cores (torch takes all of them in each worker). A compiled model
        runs each batch size before the worker is READY, since it compiles each size at its first call.
        """
        settings = context.model_yaml_config
        if settings["handler"]["divide_threads"]:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(settings["maxWorkers"])))
        super().initialize(context)
        if "pt2" in settings:
            # Ascending, and twice: the first run compiles.
            for size in 2 * list(range(1, int(settings["batchSize"]) + 1)):
                self.inference(torch.zeros(size, 3, IMAGE.crop, IMAGE.crop))
            logger.info("compiled for all batch sizes")

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str) -> torch.nn.Module:
        # BaseHandler would unpickle whatever the file holds.
        from model import EfficientNetLite0  # type: ignore[import-not-found]

        model: torch.nn.Module = EfficientNetLite0()
        model.load_state_dict(torch.load(model_pt_path, map_location="cpu", weights_only=True))
        return model

    def preprocess(self, data: list[dict[str, bytes]]) -> torch.Tensor:
        """Requests to one batch."""
        return torch.stack([to_tensor(bytes(item.get("data") or item["body"]), IMAGE) for item in data])

    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        """Logits to named probabilities."""
        with torch.inference_mode():
            probabilities, classes = torch.topk(torch.softmax(data, dim=1), IMAGE.top_k, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
