"""What single architectures need to be small and to run, beyond the rules of `shrinking` and `inputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_zoo.grid import Case

Fields = dict[str, Any]


def _stages(case: Case) -> Fields:
    return {"embed_dim": case.head, "num_heads": [1, 2], "depths": [2, 1]}


def _four_stages(case: Case) -> Fields:
    from transformers import SwinConfig

    sizes = {"embed_dim": 64, "num_heads": [1, 2, 4, 8], "depths": [2, 1, 1, 1], "window_size": 4, "image_size": 128}
    return {"backbone_config": SwinConfig(**sizes, out_features=["stage1", "stage2", "stage3", "stage4"])}


def _resnet(*stages: str) -> Callable[[Case], Fields]:
    """A backbone in place of one that timm would have."""

    def fields(case: Case) -> Fields:
        from transformers import ResNetConfig

        sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1]}
        backbone = ResNetConfig(**sizes, layer_type="basic", out_features=list(stages))
        return {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}

    return fields


def _rotary_sections(case: Case) -> Fields:
    half = case.head // 4
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": sections}
    return {"rope_parameters": rope}


# By the type of a configuration, or of a part: its arguments, or a function of the case that returns them.
FIELDS: dict[str, Fields | Callable[[Case], Fields]] = {
    "swin": _stages, "swinv2": _stages, "maskformer-swin": _stages, "donut-swin": _stages,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_head": "auto"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_n_groups": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": lambda case: {"num_heads": 4, "head_dim": case.head, "n_groups": 2},
    "mimi": lambda case: {"upsample_groups": 2 * case.head},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "nemotron": lambda case: {"num_key_value_heads": 2, "head_dim": case.head},
    "glm4v_text": _rotary_sections, "glm4v_moe_text": _rotary_sections, "glm_ocr_text": _rotary_sections,
    "glm_image_text": _rotary_sections, "glmga_text": _rotary_sections,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "maskformer": _four_stages, "mask2former": _four_stages, "oneformer": _four_stages, "upernet": _four_stages,
    "detr": _resnet("stage4"), "conditional_detr": _resnet("stage4"), "table-transformer": _resnet("stage4"),
    "dab-detr": lambda case: {**_resnet("stage4")(case), "query_dim": 4},
    "deformable_detr": _resnet("stage2", "stage3", "stage4"),
    "vjepa2": {"frames_per_clip": 8},
    "esm": {"mask_token_id": 3, "pad_token_id": 1},
    "lilt": lambda case: {"hidden_size": 3 * case.head, "num_attention_heads": 3},
    "xmod": {"default_language": "en_XX"},
    "sam2_hiera_det_model": {"hidden_size": 96, "num_attention_heads": 1},
    "dots1": {"moe_intermediate_size": 128},
}  # fmt: skip

# By model type: draws its inputs from an `inputs.Draw`.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {}
# Model types that are not run, with the reason.
LEFT_OUT: dict[str, str] = {}
# The longest text of models that loop over tokens in Python: tracing unrolls the loop.
LONGEST: dict[str, int] = dict.fromkeys(("mamba", "falcon_mamba", "jamba", "rwkv", "xlstm", "recurrent_gemma"), 33)
# Models that Dynamo does not trace with symbolic sizes in minutes, whatever the backend: these run with static ones.
STATIC = frozenset({"swin", "swinv2", "donut-swin"})
