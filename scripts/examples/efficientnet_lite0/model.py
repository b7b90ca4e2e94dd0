"""EfficientNet-Lite0 in the form that torch-model-archiver requires: one class whose constructor takes no arguments."""

from efficientnet_lite_pytorch import EfficientNet
from efficientnet_lite_pytorch.utils import get_model_params


class EfficientNetLite0(EfficientNet):
    """EfficientNet-Lite0 for ImageNet's 1000 classes: float32 images (N, 3, 224, 224) to logits (N, 1000)."""

    def __init__(self) -> None:
        blocks, settings = get_model_params("efficientnet-lite0", override_params=None)
        super().__init__(blocks, settings)
