"""The base of the vision tasks: image processor, size of the pictures, and the way through the model and back."""

import base64
import inspect
import io
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import nn

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.tasks import picture_transforms
from torchserve_openvino.tasks.hub_handler import HubHandler, RequestInput
from torchserve_openvino.tasks.request_body import RequestBody, parameters_of

Outputs = tuple[torch.Tensor, ...]
_KNOWN = ("pixel_values", "pixel_mask")
# Most pictures in one request.
_MOST_INPUTS = 64
# A processor that scales the shorter side to a fixed length makes gigabytes of a picture of one line.
_MOST_RATIO = 200


class VisionHead(nn.Module):
    """A vision model that returns only the tensors that a task reads, with what follows it in the same graph.

    Args:
        model: The model.
        takes_mask: Whether it takes ``pixel_mask``.
    """

    def __init__(self, model: nn.Module, takes_mask: bool) -> None:
        super().__init__()
        self.model = model
        self._takes_mask = takes_mask
        self.train(model.training)

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor | None = None) -> Outputs:
        """Runs the model on float32 ``[batch, 3, height, width]`` and an int64 mask ``[batch, height, width]``."""
        mask = {"pixel_mask": pixel_mask} if self._takes_mask else {}
        return self.outputs(self.model(pixel_values=pixel_values, **mask))

    def outputs(self, output: Any) -> Outputs:
        """Returns the tensors that a task reads."""
        return (output.logits,)


@dataclass(frozen=True)
class PreparedPicture:
    """One input, prepared for the model.

    Attributes:
        part: The input and its parameters.
        tensors: The model's inputs, without the batch dimension.
        size: Height and width of the picture as sent, turned upright.
        facts: What the task needs again for the answer.
    """

    part: RequestInput
    tensors: Mapping[str, torch.Tensor]
    size: tuple[int, int]
    facts: Any = None


class VisionHandler(HubHandler):
    """A vision task: `answer` reads the model's outputs for one picture.

    Attributes:
        head: The module that is compiled around the model.
        example: Parameters of a request that the task answers, for a trial before anything is compiled.
        processor: The model's image processor.
        names: Tensors that the model takes.
        shapes: Shape of each, without the batch dimension.
        model_config: What the model's config.json says.
    """

    # Pillow releases the GIL while it decodes and resizes.
    decodes_in_parallel = True
    # Whether `answer` is thread-safe and benefits from threads, as where it computes in the size of the picture.
    answers_in_parallel = False
    takes = Annotated[str, Field(description="A picture: base64, or a data: URL.")]
    size_key = "handler.openvino.image.max_bytes"
    head: ClassVar[type[VisionHead]] = VisionHead
    example: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.processor: Any = None
        self.names: list[str] = []
        self.shapes: Shapes = {}
        self.model_config: Any = None
        self._settings: dict[str, Any] = {}

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> nn.Module:
        """Loads model and image processor, and finds the size of the model's pictures.

        Weights in float16 and bfloat16 become float32, as the pixels are.
        """
        model = self.load_model(folder).float()
        self.model_config = model.config
        self.processor = hub.load_image_processor(folder)
        if self._openvino.config.openvino.batching.dims:
            raise ModelLoadError("handler.openvino.batching.dims has no use here: this task's pictures have one size.")
        taken = inspect.signature(model.forward).parameters
        names = [name for name in _KNOWN if name in taken or name == "pixel_values"]
        self._settings, self.shapes = one_size(self.processor, names, self._openvino.config.openvino.warmup.inputs)
        self.names = list(self.shapes)
        return model

    def load_model(self, folder: Path) -> nn.Module:
        """Loads the model."""
        return super().load(folder)

    def servable(self, model: Any) -> Any:
        """Returns the model inside the task's head, after it has answered a blank picture in eager PyTorch."""
        head = self.wrapped(model)
        self.try_out(head)
        return head

    def wrapped(self, model: Any) -> nn.Module:
        """Returns the model inside the task's head."""
        return self.head(model, "pixel_mask" in self.names)

    def try_out(self, head: nn.Module) -> None:
        """Answers a blank picture in eager PyTorch, so that a model of another kind is refused before READY.

        Raises:
            ModelLoadError: There is no answer.
        """
        part = RequestInput(None, parameters_of(self.parameters, self.example))
        try:
            with torch.inference_mode():
                picture = self.prepared(part, Image.new("RGB", (64, 48), "grey"))
                outputs = head(**_batch([picture]))
                self.answer(picture, [output[0] for output in outputs])
        except (ItemError, AttributeError, ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise ModelLoadError(
                f"{type(self.model).__name__} with {type(self.processor).__name__} is no model for {self.task}: {error}"
            ) from error

    def limits(self) -> tuple[int, int]:
        """Returns the largest body in bytes, and the most pictures in one request."""
        # Four base64 characters encode three bytes; a request has parameters besides.
        return self._openvino.config.openvino.image.max_bytes * 4 // 3 + 65536, _MOST_INPUTS

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the pixels, and the mask of their padding where the model takes one."""
        known: Mapping[str, Mapping[str, Any]] = {
            "pixel_values": {},
            "pixel_mask": {"dtype": "int64", "mask": True},
        }
        return [WarmupInput(name=name, shape=list(shape), **known[name]) for name, shape in self.shapes.items()]

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body."""
        return (), _batch([self.decode(part) for part in self.parts_of(body)])

    # --- requests ---------------------------------------------------------------------------------------------

    def ask(self, value: Any, max_bytes: int, max_inputs: int) -> RequestBody:
        """Reads what one request asks: the bytes of a picture, or JSON with base64 text."""
        if isinstance(value, (bytes, bytearray)) and bytes(value[:64]).lstrip()[:1] not in {b"{", b"["}:
            # No encoding of a picture begins with these brackets. A data: URL is text.
            return RequestBody([value if value[:5] != b"data:" else value.decode("latin-1")], {}, False)
        if isinstance(value, Mapping) and "inputs" not in value and "b64" in value:
            value = {"inputs": value["b64"], "parameters": value.get("parameters")}
        return super().ask(value, max_bytes, max_inputs)

    def warm_decoding(self) -> None:
        """Decodes photos."""
        picture_transforms.warm(self._openvino.config.openvino.image)

    def decode(self, item: RequestInput) -> PreparedPicture:
        """Decodes one picture, and prepares it for the model."""
        return self.prepared(item, picture_transforms.picture_of(item.input, self._openvino.config.openvino.image))

    def prepared(self, part: RequestInput, picture: Image.Image) -> PreparedPicture:
        """Returns a picture as the model's inputs.

        Raises:
            InvalidInputError: The model's image processor does not take it.
        """
        width, height = picture.size
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise InvalidInputError(
                f"the picture has {width} x {height} pixels; one side may be {_MOST_RATIO} times the other at most"
            )
        if (side := unbounded_side(self.processor)) is not None:
            size = (round(side * width / min(width, height)), round(side * height / min(width, height)))
            what = f"the picture of {width} x {height} pixels, with its shorter side resized,"
            picture_transforms.check_resized(*size, self._openvino.config.openvino.image, what)
        try:
            tensors = processed(self.processor, picture, self._settings)
        except ValueError as error:
            raise InvalidInputError(
                f"the model's image processor does not take a picture of {width} x {height} pixels: {error}"
            ) from error
        return PreparedPicture(part, {name: tensors[name] for name in self.names}, (height, width), self.facts(part))

    def facts(self, part: RequestInput) -> Any:
        """Returns what the task needs again for the answer.

        Raises:
            InvalidInputError: The parameters can't be used.
        """
        return None

    @abstractmethod
    def answer(self, picture: PreparedPicture, outputs: Sequence[torch.Tensor]) -> Any:
        """Returns the answer for one picture.

        Args:
            picture: The picture.
            outputs: The head's outputs for it, without the batch dimension.

        Raises:
            ItemError: There is no answer.
        """

    def predict(self, values: list[PreparedPicture]) -> list[Any]:
        """Runs the pictures, together if the model allows it, and answers each."""
        together = self._openvino.served is None or self._openvino.served.joins
        groups = [values] if together else [[value] for value in values]
        answers: list[Any] = []
        with torch.inference_mode():
            for group in groups:
                outputs = self.model(**_batch(group))
                calls = [
                    partial(self._answered_one, value, [output[index] for output in outputs])
                    for index, value in enumerate(group)
                ]
                # With several threads, PyTorch splits each operator among them.
                answers += self._call_all(self.answers_in_parallel and torch.get_num_threads() == 1, calls)
        return answers

    def _answered_one(self, value: PreparedPicture, outputs: list[torch.Tensor]) -> Any:
        try:
            self.check_finite(outputs)
            return self.answer(value, outputs)
        except ItemError as error:
            return error

    def run_eager(self, value: PreparedPicture) -> Any:
        """Runs the eager model on one picture."""
        return self._openvino.eager_model(**_batch([value]))


def _batch(pictures: Sequence[PreparedPicture]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([picture.tensors[name] for picture in pictures]) for name in pictures[0].tensors}


# --- encodes maps of numbers as PNG in base64, for JSON answers ---------------------------------------------------


# zlib's fastest: of a depth map of 800 x 600, 16 bits take 26 ms instead of 70 and 3 % more bytes, 8 bits 7 instead of
# 31 and 39 % more; all of the model takes 30.
_COMPRESSION = 1


def png(numbers: torch.Tensor) -> str:
    """Returns a greyscale PNG of integers ``[height, width]``, of 8 bits where they fit, otherwise of 16."""
    array = numbers.numpy()
    kind = np.uint8 if array.size == 0 or int(array.max()) < 256 else np.uint16
    buffer = io.BytesIO()
    Image.fromarray(array.astype(kind)).save(buffer, "PNG", compress_level=_COMPRESSION)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


# --- finds the one shape in which a model's image processor hands over all pictures, or makes it do so ------------


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
    return shapes[0] if all(shape == shapes[0] for shape in shapes) else None


def _declared_size(declared: Sequence[WarmupInput]) -> tuple[int, int] | None:
    if not declared:
        return None
    shape = declared[0].item_shape()
    if len(declared) > 1 or len(shape) != 3 or not all(isinstance(size, int) for size in shape):
        raise ModelLoadError(
            "handler.openvino.warmup.inputs may only state the size of pictures for this task: [{shape: [3, HEIGHT, "
            "WIDTH]}]."
        )
    return int(shape[1]), int(shape[2])
