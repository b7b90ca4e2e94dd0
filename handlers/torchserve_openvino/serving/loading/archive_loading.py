"""Loads a handler's model as TorchServe's BaseHandler does, and in formats that BaseHandler does not support."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading import files as loading
from torchserve_openvino.serving.loading.archive_manifest import QUANTIZED_MODEL, has_f32, is_quantized, not_quantized
from torchserve_openvino.serving.loading.files import is_exported, load_without_class

logger = logging.getLogger(__name__)

_LOAD = "_load_torchscript_model"


class ArchiveLoading:
    """Changes what `BaseHandler.initialize` reads, and the methods by which it loads a model.

    Args:
        handler: The handler.

    Attributes:
        handler: As above.
        config: The handler's settings.
        model_dir: Where the archive was unpacked.
        loaded: What `initialize` set the handler's ``model`` to.
        quantized: The quantized model beside one in f32, between which `precision: auto` chooses; None otherwise.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.config = ServingConfig()
        self.model_dir = Path()
        self.loaded: Any = None
        self.quantized: Any = None
        self._serialized: Path | None = None

    def find_weights(self, context: Any) -> None:
        """Remembers the path of the weights file, under its real name.

        Raises:
            ModelLoadError: The archive holds no quantized model, which its YAML asks for.
        """
        if problem := not_quantized(self.model_dir, self.config):
            raise ModelLoadError(f"{problem}.")
        name = (context.manifest or {}).get("model", {}).get("serializedFile")
        self._serialized = self.model_dir / name if name else None

    @contextmanager
    def without_pt2(self, context: Any) -> Iterator[None]:
        """Hides ``pt2`` from BaseHandler, which would compile lazily and change the dict."""
        config = context.model_yaml_config
        context.model_yaml_config = {key: value for key, value in (config or {}).items() if key != "pt2"}
        try:
            yield
        finally:
            context.model_yaml_config = self.handler.model_yaml_config = config

    @contextmanager
    def while_base_handler_loads(self, context: Any) -> Iterator[None]:
        """Hides the weights' file type from BaseHandler only; a user's code sees the real name.

        Without a model file, BaseHandler goes by the suffix: for ``.pt`` it calls `_load_torchscript_model`, which here
        looks into the file. A handler's own method of that name gets the real path.
        """
        handler, manifest = self.handler, context.manifest
        path = str(self._serialized) if self._serialized else None
        model = dict((manifest or {}).get("model", {}))
        if hides := not model.get("modelFile"):
            model["serializedFile"] = "model.pt"
            load = handler._load_torchscript_model

            def load_real(_: str) -> Any:
                context.manifest = handler.manifest = manifest
                handler.model_pt_path = path
                return load(path)

            vars(handler)[_LOAD] = load_real
        context.manifest = {**(manifest or {}), "model": model}
        try:
            yield
        finally:
            if hides:
                vars(handler).pop(_LOAD, None)
            context.manifest = handler.manifest = manifest
            handler.model_pt_path = path

    def servable(self, model: Any) -> Any:
        """Returns the module to compile for a loaded model; a task may wrap it. Eager comparisons use it as well."""
        return model

    def model_to_serve(self) -> Any:
        """Returns the module to compile: that of `servable`, or the quantized one that `package` made of it."""
        self.loaded = self.loaded_model()
        if not is_quantized(self.model_dir):
            return self.servable(self.loaded)
        quantized = quantized_model(self.model_dir, self.loaded)
        section = self.config.openvino
        if not has_f32(self.model_dir) or "precision" not in section.model_fields_set:
            return quantized
        self.quantized = quantized if section.precision == "auto" else None
        return self.servable(self.loaded)

    def loaded_model(self) -> Any:
        """Returns what `initialize` set ``self.model`` to.

        Raises:
            ModelLoadError: It set nothing, and no other modules are to be compiled.
        """
        model = getattr(self.handler, "model", None)
        if model is None and not self._calls_others:
            raise ModelLoadError(
                f"{type(self.handler).__name__}.initialize sets no self.model: set it to the torch.nn.Module that "
                "answers requests, or name that module in handler.openvino.compile."
            )
        return model

    @property
    def _calls_others(self) -> bool:
        """Whether other modules than ``self.model`` are known, or will be found by running samples."""
        return bool(self.config.openvino.compile or self.config.openvino.warmup.samples)

    def compilable(self, model: Any) -> nn.Module | None:
        """Returns the model, or None if it is not a module and other modules are compiled.

        Raises:
            ModelLoadError: The model is not a module, and no other modules are compiled.
        """
        if isinstance(model, nn.Module):
            return model
        if not self._calls_others:
            raise ModelLoadError(
                f"{type(self.handler).__name__}.initialize sets self.model to a {type(model).__name__}: set it to the "
                "torch.nn.Module in it (a pipeline's .model), name the modules in it (handler.openvino.compile: "
                "[model.encoder, models[0]]), or serve it as it is by pt2: {compile: {enable: false}}."
            )
        return None

    def load_pickled(self, model_dir: str, model_file: str, model_pt_path: str | None) -> nn.Module:
        """Loads the class in a model file, with its weights; BaseHandler's `_load_pickled_model`.

        Raises:
            ModelLoadError: The class cannot be created, or the weights do not fit it.
        """
        model = loading.load_class(Path(model_dir), model_file)
        if model_pt_path:
            loading.load_weights(model, Path(model_pt_path), self.config.openvino.weights)
        elif any(True for _ in model.parameters()):
            logger.warning(
                "No weights were packaged (--serialized-file): %s keeps those that its class creates, which are "
                "random unless it loads them.", type(model).__name__,
            )  # fmt: skip
        return model

    def load_without_class(self, model_pt_path: str | None) -> nn.Module:
        """Loads a file that holds code and weights; BaseHandler's `_load_torchscript_model`.

        Raises:
            ModelLoadError: There is no such file, or it holds no model that can be compiled.
        """
        if not model_pt_path:
            raise ModelLoadError(
                "the archive has neither a model file (--model-file) nor a model (--serialized-file), and the handler "
                "loads none by itself."
            )
        if self.config.openvino.weights.model_fields_set:
            raise ModelLoadError(
                f"handler.openvino.weights is for checkpoints that are packaged with --model-file; without that file, "
                f"{Path(model_pt_path).name} has to be a whole model. Remove the section, or add the file."
            )
        return loading.load_without_class(Path(model_pt_path))


# --- models that `package --quantize` made: an exported program, beside what a task needs to know of the model ----


class QuantizedModel(nn.Module):
    """A quantized model in the place of the one that it was made from.

    Args:
        exported: Computes.
        model: A model without weights, for its configuration.
    """

    def __init__(self, exported: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.exported, self.model = exported, model
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the exported program."""
        return self.exported(*args, **kwargs)


def quantized_model(model_dir: Path, loaded: Any) -> Any:
    """Returns the quantized model of an archive.

    Args:
        model_dir: The unpacked archive.
        loaded: What the handler loaded: the exported program itself, a model without weights, or the one in f32.
    """
    if not has_f32(model_dir) and isinstance(loaded, nn.Module) and is_exported(loaded):
        return loaded
    return QuantizedModel(load_without_class(model_dir / QUANTIZED_MODEL), loaded)
