"""Finds the one shape in which a model's image processor hands over all pictures, or makes it do so."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from torchserve_openvino.config.sections.handler import WarmupInput
from torchserve_openvino.errors import ModelLoadError

Shapes = dict[str, tuple[int, ...]]
# Width and height of pictures that a processor treats differently if it keeps the aspect ratio or skips small ones.
_TRIED = ((60, 40), (40, 60), (50, 50), (1200, 900))


def processed(processor: Any, picture: Image.Image, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for one RGB picture, without the batch dimension."""
    # Without the layout, transformers takes a picture of height 1 or 3 for one whose channels come first.
    features = processor(images=picture, return_tensors="pt", input_data_format="channels_last", **settings)
    return {name: value[0] for name, value in features.items() if isinstance(value, torch.Tensor)}


def one_size(processor: Any, names: Sequence[str], declared: Sequence[WarmupInput]) -> tuple[dict[str, Any], Shapes]:
    """Makes all pictures one size.

    Three ways, in this order: as the processor is; padded to its largest size, if the model takes a mask of the
    padding; stretched to the size that the YAML declares.

    Args:
        processor: The model's image processor.
        names: Tensors that the model takes.
        declared: ``warmup.inputs``.

    Returns:
        Further arguments for the processor, and the shape of each tensor without the batch dimension.

    Raises:
        ModelLoadError: There is no such size.
    """
    declared_size = _declared_size(declared)
    settings: dict[str, Any] = {}
    shapes = _shapes(processor, names, settings)
    largest = _extent(processor)
    if shapes is None and declared_size is not None:
        settings = _stretching(processor, declared_size)
        shapes = _shapes(processor, names, settings)
    elif shapes is None and largest is not None and "pixel_mask" in names:
        settings = {"do_pad": True, "pad_size": {"height": largest[0], "width": largest[1]}}
        shapes = _shapes(processor, names, settings)
    size = None if shapes is None else shapes["pixel_values"][1:]
    if declared_size is not None and size != declared_size:
        says = "does not make them one size" if size is None else f"makes them {size[0]} x {size[1]}"
        raise ModelLoadError(
            f"handler.openvino.warmup.inputs declares pictures of {declared_size[0]} x {declared_size[1]}; the model's "
            f"{type(processor).__name__} {says}."
        )
    if shapes is None:
        height, width = largest or (640, 640)
        raise ModelLoadError(
            f"{type(processor).__name__} keeps the aspect ratio of pictures, but the model is compiled for one size. "
            f"State it, as handler.openvino.warmup.inputs: [{{shape: [3, {height}, {width}]}}]. Pictures are stretched "
            "to it then, so answers differ a little from those of the processor's own settings."
        )
    return settings, shapes


def _stretching(processor: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the settings with which a processor stretches every picture to a size."""
    off = {name: False for name in ("keep_aspect_ratio", "do_pad", "do_center_crop") if hasattr(processor, name)}
    return {"do_resize": True, "size": {"height": size[0], "width": size[1]}, **off}


def _extent(processor: Any) -> tuple[int, int] | None:
    """Returns height and width that no processed picture exceeds, as far as the processor states them."""
    size = dict(getattr(processor, "size", None) or {})
    if "longest_edge" in size:
        return int(size["longest_edge"]), int(size["longest_edge"])
    for height, width in (("max_height", "max_width"), ("height", "width")):
        if height in size and width in size:
            return int(size[height]), int(size[width])
    return None


def unbounded_side(processor: Any) -> int | None:
    """Returns the length that a processor makes the shorter side, if it leaves the longer one unbounded."""
    size = dict(getattr(processor, "size", None) or {})
    return int(size["shortest_edge"]) if "shortest_edge" in size and _extent(processor) is None else None


def _shapes(processor: Any, names: Sequence[str], settings: Mapping[str, Any]) -> Shapes | None:
    """Returns the shapes of the processor's tensors; None if they differ between pictures.

    Raises:
        ModelLoadError: The processor fails, or makes no picture.
    """
    shapes: list[Shapes] = []
    for size in _TRIED:
        try:
            features = processed(processor, Image.new("RGB", size), settings)
        except (ValueError, TypeError, KeyError, ImportError) as error:
            raise ModelLoadError(f"{type(processor).__name__} cannot prepare a picture: {error}") from error
        shapes.append({name: tuple(features[name].shape) for name in names if name in features})
    if len(shapes[0].get("pixel_values", ())) != 3:
        raise ModelLoadError(f"{type(processor).__name__} makes no pixel_values [3, height, width].")
    return shapes[0] if all(each == shapes[0] for each in shapes) else None


def _declared_size(declared: Sequence[WarmupInput]) -> tuple[int, int] | None:
    if not declared:
        return None
    shape = declared[0].item_shape()
    if len(declared) > 1 or len(shape) != 3 or not all(isinstance(each, int) for each in shape):
        raise ModelLoadError(
            "handler.openvino.warmup.inputs may only state the size of pictures for this task: [{shape: [3, HEIGHT, "
            "WIDTH]}]."
        )
    return int(shape[1]), int(shape[2])
