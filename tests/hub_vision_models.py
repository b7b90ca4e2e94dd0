"""Small Hugging Face vision models with random weights, and their image processors, saved as `save_pretrained` does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LABELS = [f"thing {number}" for number in range(7)]
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: number for number, name in enumerate(LABELS)}}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def save(folder: Path, make: Callable[[], Any], processor: Any, scale: float = 4.0) -> Path:
    """Saves a model whose scores differ enough to have an order, and its image processor."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not bool(parameter.any()):
                # Tokens and positions start as zeros, so that all queries of a detector would answer the same.
                parameter.normal_()
            elif parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def vision_model(task: str, folder: Path) -> Path:
    """Saves a small model for a vision task."""
    return _MAKERS[task](folder)


def classifier(folder: Path, **changes: Any) -> Path:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    config = ViTConfig(**SMALL, **NAMES, image_size=32, patch_size=8, **changes)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    return save(folder, lambda: ViTForImageClassification(config), processor)


def encoder(folder: Path) -> Path:
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    config = ViTConfig(**SMALL, image_size=32, patch_size=8)
    return save(folder, lambda: ViTModel(config), ViTImageProcessorPil(size={"height": 32, "width": 32}))


def segmenter(folder: Path) -> Path:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessorPil

    config = SegformerConfig(
        **NAMES, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    processor = SegformerImageProcessorPil(size={"height": 32, "width": 48})
    return save(folder, lambda: SegformerForSemanticSegmentation(config), processor)


def detector(folder: Path, size: dict[str, int] | None = None) -> Path:
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

    config = YolosConfig(**SMALL, **NAMES, image_size=[32, 48], patch_size=16, num_detection_tokens=9)
    processor = YolosImageProcessorPil(size=size or {"height": 32, "width": 48})
    return save(folder, lambda: YolosForObjectDetection(config), processor, scale=8.0)


def masked_detector(folder: Path) -> Path:
    """A DETR, which takes a mask of the padding."""
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessorPil, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        **NAMES, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        num_queries=6, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    processor = DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    return save(folder, lambda: DetrForObjectDetection(config), processor)


def depth(folder: Path) -> Path:
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config, DPTImageProcessorPil

    backbone = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        out_features=["stage1", "stage2"], reshape_hidden_states=False,
    )  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=32, reassemble_factors=[2, 1],
        neck_hidden_sizes=[8, 16], fusion_hidden_size=8, head_hidden_size=8, head_in_index=-1,
    )  # fmt: skip
    processor = DPTImageProcessorPil(size={"height": 28, "width": 42}, do_resize=True, keep_aspect_ratio=False)
    return save(folder, lambda: DepthAnythingForDepthEstimation(config), processor, scale=3.0)


def pictures_and_texts(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    from hub_models import VOCABULARY, save_tokenizer

    tower = {**SMALL, "projection_dim": 16}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, "bos_token_id": 101, "eos_token_id": 102}
    config = CLIPConfig(
        text_config={**tower, **text, "pad_token_id": 0}, vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    saved = save(folder, lambda: CLIPModel(config), processor, scale=2.0)
    save_tokenizer(folder)
    return saved


_MAKERS: dict[str, Callable[[Path], Path]] = {
    "hub_image_classifier": classifier,
    "image_segmenter": segmenter,
    "object_detector": detector,
    "depth_estimator": depth,
    "zero_shot_image_classifier": pictures_and_texts,
    "image_embedder": encoder,
}
