"""Models that `package --quantize` made: an exported program, beside what a task needs to know of the model."""

from pathlib import Path
from typing import Any

from torch import nn

from torchserve_openvino.serving.loading.archive import QUANTIZED_MODEL, has_f32
from torchserve_openvino.serving.loading.files import is_exported, load_without_class


class QuantizedModel(nn.Module):
    """A quantised model in the place of the one that it was made from.

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
    """Returns the quantised model of an archive.

    Args:
        model_dir: The unpacked archive.
        loaded: What the handler loaded: the exported program itself, a model without weights, or the one in f32.
    """
    if not has_f32(model_dir) and isinstance(loaded, nn.Module) and is_exported(loaded):
        return loaded
    return QuantizedModel(load_without_class(model_dir / QUANTIZED_MODEL), loaded)
