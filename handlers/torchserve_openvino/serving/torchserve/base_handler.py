"""`BaseHandler` where TorchServe is not installed: its steps and attributes, for the handlers of this package."""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from torchserve_openvino.errors import NotExplainedError
from torchserve_openvino.serving.loading.labels import LABELS, read_labels

logger = logging.getLogger(__name__)


class BaseHandler:
    """Loads a model, and answers a batch by `preprocess`, `inference` and `postprocess`."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0

    def initialize(self, context: Any) -> None:
        """Loads the model that the manifest names, on the CPU, and the labels of its classes."""
        self.model_yaml_config = context.model_yaml_config
        self.map_location = "cpu"
        self.device = torch.device("cpu")
        self.manifest = context.manifest
        folder, model = Path(context.system_properties["model_dir"]), self.manifest["model"]
        if name := model.get("serializedFile"):
            self.model_pt_path = str(folder / name)
        if model.get("modelFile"):
            self.model = self._load_pickled_model(str(folder), model["modelFile"], self.model_pt_path)
        else:
            self.model = self._load_torchscript_model(self.model_pt_path)
        self.model.eval()
        self.mapping = read_labels(folder / LABELS)
        if self.mapping is None:
            logger.info("%s is missing: answers have the numbers of classes.", LABELS)
        self.initialized = True

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """Loads the class in a model file, with its weights; this package's worker does that."""
        raise NotImplementedError

    def _load_torchscript_model(self, model_pt_path: str | None) -> Any:
        """Loads a model from a file with code and weights; this package's worker does that."""
        raise NotImplementedError

    def preprocess(self, data: Any) -> Any:
        """Returns the model's input for a batch."""
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        """Returns an answer for each item of a batch."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """Answers a batch."""
        start = time.perf_counter()
        self.context = context
        prepared = self.preprocess(data)
        if self._is_explain():
            answers = self.explain_handle(prepared, data)
        else:
            answers = self.postprocess(self.inference(prepared))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - start) * 1e3, 2))
        return answers

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Refuses: explanations are TorchServe's.

        Raises:
            NotExplainedError: Always.
        """
        raise NotExplainedError("this handler explains answers by TorchServe's code, which is not installed here")

    def _is_explain(self) -> bool:
        return self._asks("explain")

    def _is_describe(self) -> bool:
        return self._asks("describe")

    def _asks(self, what: str) -> bool:
        return bool(self.context and self.context.get_request_header(0, what) == "True")
