"""Packages a timm model with a weights file: model.py, weights and model-config.yaml for image_classifier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchserve_openvino.config.spelling import nearest
from torchserve_openvino.config.yaml_source import read_yaml
from torchserve_openvino.errors import PackagingError

if TYPE_CHECKING:
    import torch

_MODEL = '''\
"""{name} of timm, as `torchserve-openvino package --timm` wrote it."""

import timm
import torch


class TimmModel(torch.nn.Module):
    """Maps normalized photos ``[batch, 3, {size}, {size}]`` to logits ``[batch, {classes}]``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model({name!r}, pretrained=False, num_classes={classes})

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        return self.model(pixels)
'''
_FILTERS = ("bilinear", "bicubic", "nearest")
_SHOWN = 5


@dataclass(frozen=True)
class TimmFiles:
    """What was written.

    Attributes:
        model: model.py.
        weights: The weights, by the names of ``model``.
        config: model-config.yaml with the model's own pre-processing.
    """

    model: Path
    weights: Path
    config: Path


def write_timm(name: str, weights: Path, config: Path, folder: Path, *, keeps_image: bool = False) -> TimmFiles:
    """Writes the files of an archive for a timm model.

    Args:
        name: The model's name in timm.
        weights: Its weights: .safetensors, or a checkpoint that holds tensors only.
        config: The model-config.yaml to start from.
        folder: Where to write.
        keeps_image: Whether keys of ``handler.openvino.image`` in ``config`` win over the model's own.

    Raises:
        PackagingError: timm can't be imported or does not know the name, the weights do not fit, or image_classifier
            can't prepare the model's input.
    """
    timm = _imported()
    from safetensors.torch import save_file

    if not timm.is_model(name):
        hint = nearest(name, timm.list_models())
        raise PackagingError(f"--timm: unknown model {name!r}.{f' Did you mean {hint!r}?' if hint else ''}")
    state = _read(timm, weights)
    classes = _classes(timm, name, state)
    model = timm.create_model(name, pretrained=False, **({} if classes is None else {"num_classes": classes}))
    _check_fits(model.state_dict(), state, name, weights)
    image = image_section(timm.data.resolve_model_data_config(model), name)
    written = TimmFiles(folder / "model.py", folder / "weights.safetensors", folder / "model-config.yaml")
    text = _MODEL.format(name=name, size=image["crop"], classes=model.num_classes)
    written.model.write_text(text, "utf-8")
    save_file({f"model.{key}": tensor.contiguous() for key, tensor in state.items()}, written.weights)
    document = dict(read_yaml(config).data)
    openvino = document
    for key in ("handler", "openvino"):
        # Nothing behind a key is an empty section.
        openvino[key] = {} if openvino.get(key) is None else openvino[key]
        openvino = openvino[key]
        if not isinstance(openvino, dict):
            raise PackagingError(f"{config}: {key} must be a mapping, not {type(openvino).__name__}.")
    section = openvino.get("image") or {}
    openvino["image"] = {**image, **section} if keeps_image else {**section, **image}
    written.config.write_text(yaml.safe_dump(document, sort_keys=False), "utf-8")
    return written


def image_section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Translates timm's data configuration to ``handler.openvino.image``.

    Formula: timm's `transforms_imagenet_eval`: the shorter side becomes ``floor(size / crop_pct)``, then the center is
    cut out.

    Args:
        data: What `timm.data.resolve_model_data_config` returns.
        name: The model's name, for errors.

    Raises:
        PackagingError: image_classifier has no such pre-processing.
    """
    channels, height, width = data["input_size"]
    if channels != 3 or height != width:
        raise PackagingError(f"--timm {name}: takes {list(data['input_size'])}; image_classifier makes [3, n, n] only.")
    if data["crop_mode"] != "center":
        raise PackagingError(f"--timm {name}: crop_mode {data['crop_mode']!r}; image_classifier cuts the center only.")
    if data["interpolation"] not in _FILTERS:
        raise PackagingError(
            f"--timm {name}: interpolation {data['interpolation']!r}; image_classifier has {', '.join(_FILTERS)}."
        )
    return {
        "resize": math.floor(height / data["crop_pct"]),
        "crop": height,
        "interpolation": data["interpolation"],
        "mean": [float(value) for value in data["mean"]],
        "std": [float(value) for value in data["std"]],
    }


def _imported() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        # RuntimeError: a torchvision that was built for another torch.
        raise PackagingError(
            f"--timm: timm can't be imported ({error}). Install the extra: pip install torchserve-openvino[timm]; timm "
            "needs a torchvision that fits the installed torch."
        ) from error
    return timm


def _read(timm: Any, weights: Path) -> dict[str, "torch.Tensor"]:
    try:
        state: dict[str, torch.Tensor] = timm.models.load_state_dict(str(weights), device="cpu", weights_only=True)
    except Exception as error:
        # timm's reader has no error of its own: damaged files raise what their formats raise.
        raise PackagingError(f"--weights {weights}: {type(error).__name__}: {error}") from error
    return state


def _classes(timm: Any, name: str, state: Mapping[str, "torch.Tensor"]) -> int | None:
    """Returns the number of classes that the weights' last layer has; None if it has another name."""
    layer = timm.models.get_pretrained_cfg(name).classifier
    weight = state.get(f"{layer}.weight") if isinstance(layer, str) else None
    return None if weight is None else int(weight.shape[0])


def _check_fits(
    expected: Mapping[str, "torch.Tensor"], loaded: Mapping[str, "torch.Tensor"], name: str, weights: Path
) -> None:
    problems = [
        f"{key} has {list(loaded[key].shape)}; the model has {list(tensor.shape)}"
        for key, tensor in expected.items()
        if key in loaded and loaded[key].shape != tensor.shape
    ]
    problems += [f"{key} is not the model's" for key in loaded if key not in expected]
    problems += [f"{key} is missing" for key in expected if key not in loaded]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PackagingError(f"--weights {weights} do not fit {name}: {'; '.join(problems[:_SHOWN])}{more}.")
