"""The section `handler.openvino`: what happens around compilation. One pydantic model per sub-section."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from torchserve_openvino.config.kinds import FALLBACK_KINDS
from torchserve_openvino.config.spelling import listed, nearest, shown

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
)


class Misspelt(ValueError):
    """A word outside a list; carries the nearest valid one."""

    def __init__(self, message: str, suggestion: str | None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def _integer(value: Any) -> Any:
    # pydantic would take true for 1 and "8" for 8.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, not {shown(value)}.")
    return value


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 (no point) as a string.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"must be a number, not {shown(value)}.") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"must be a number, not {shown(value)}.")
    return float(value)


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}.")
    return value


def _off(value: Any) -> Any:
    # YAML 1.1 reads a bare `off` as false.
    return "off" if value is False else value


def _sizes(value: Any) -> Any:
    """`auto`, or batch sizes in ascending order without repeats."""
    if value == "auto":
        return value
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if not sizes or not all(_is_count(size) for size in sizes):
        message = f"must be auto or a list of integers of at least 1, not {shown(value)}."
        raise Misspelt(message, nearest(str(value), ["auto"]))
    return sorted(set(sizes))


def _threads(value: Any) -> Any:
    if value == "auto" or _is_count(value):
        return value
    message = f"must be auto or an integer of at least 1, not {shown(value)}."
    raise Misspelt(message, nearest(str(value), ["auto"]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _kinds(value: Any) -> Any:
    if value == "all":
        return value
    kinds = value if isinstance(value, (list, tuple)) else [value]
    for kind in kinds:
        if kind not in FALLBACK_KINDS:
            hint = nearest(str(kind), (*FALLBACK_KINDS, "all"))
            raise Misspelt(f"must be all or a list of {listed(FALLBACK_KINDS)}, not {shown(kind)}.", hint)
    return list(dict.fromkeys(kinds))


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise Misspelt(f"must be one of {listed(DTYPES)}, not {shown(value)}.", nearest(name, DTYPES))
    return name


Integer = Annotated[int, BeforeValidator(_integer)]
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Number, Field(gt=0.0)]
Boolean = Annotated[bool, BeforeValidator(_boolean)]
Sizes = Annotated[Literal["auto"] | list[int], PlainValidator(_sizes, json_schema_input_type=str | list[int])]
Threads = Annotated[Literal["auto"] | int, PlainValidator(_threads, json_schema_input_type=str | int)]
Kinds = Annotated[Literal["all"] | list[str], PlainValidator(_kinds, json_schema_input_type=str | list[str])]
DType = Annotated[str, PlainValidator(_dtype, json_schema_input_type=str)]
OnViolation = Literal["refuse", "warn"]
Channels = tuple[Number, Number, Number]


class Section(BaseModel):
    """Base: no unknown keys, no change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WarmupInput(Section):
    """One input of the model, filled with random values at warm-up."""

    name: str | None = None
    """Keyword of the model's forward; positional in the order given when absent."""
    shape: list[Count]
    """Shape of one item, without the batch dimension."""
    dtype: DType = "float32"
    """PyTorch's name of the element type."""
    low: Number | None = None
    """Least value; for integers 0, for floats a normal distribution, when neither bound is given."""
    high: Number | None = None
    """Upper bound; exclusive for integers. For token ids: the size of the vocabulary."""

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupInput":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}).")
        return self


class WarmupSection(Section):
    """Compiles before the first request: after READY nothing is compiled."""

    inputs: list[WarmupInput] = []
    """The model's inputs; empty leaves it to the handler, which may know them."""
    batch_sizes: Sizes = "auto"
    """Batch sizes to run; auto takes every bucket up to batchSize."""


class FallbackSection(Section):
    """What may run outside OpenVINO, and what happens otherwise."""

    allow: Kinds = "all"
    """Causes of fallback that are accepted; an empty list accepts none."""
    min_coverage: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """Least share of operators on OpenVINO, 0..1."""
    on_violation: OnViolation = "warn"
    """refuse: the worker does not start; warn: a line in the log."""
    to: Literal["eager", "inductor"] = "eager"
    """Who runs a partition that OpenVINO could not compile. Inductor needs a C++ compiler."""


class VerifySection(Section):
    """Compares the compiled model with eager PyTorch on the warm-up inputs, before READY."""

    against: Annotated[Literal["eager", "off"], BeforeValidator(_off)] = "eager"
    """off skips the comparison."""
    max_abs: Positive | None = None
    """Largest absolute difference that is accepted; None takes a tolerance by precision."""
    on_violation: OnViolation = "refuse"
    """refuse: the worker does not start; warn: a line in the log."""


class BatchingSection(Section):
    """Which batch shapes are compiled, and how a batch between them is run."""

    mode: Literal["bucket", "exact", "dynamic"] = "bucket"
    """bucket pads a batch to the next compiled size; exact compiles each size; dynamic compiles one symbolic graph."""
    buckets: Sizes = "auto"
    """Compiled batch sizes; auto takes the powers of two up to batchSize, and batchSize."""


class ImageSection(Section):
    """Transforms of image_classifier, as torchvision's Resize, CenterCrop, ToTensor and Normalize."""

    resize: Count = 256
    """Length in pixels of the shorter side after resizing."""
    crop: Count = 224
    """Side in pixels of the square that is cut from the centre."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each channel in 0..1, RGB; ImageNet's by default."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel in 0..1, RGB; ImageNet's by default."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Filter of the resizing."""
    top_k: Count = 5
    """How many classes are answered."""
    max_pixels: Count = 89_478_485
    """Largest picture that is decoded, in pixels; Pillow's own limit against decompression bombs."""
    max_bytes: Count = 32 * 1024 * 1024
    """Largest picture that is taken, in bytes as sent."""


class TensorSection(Section):
    """Requests of the handler tensor."""

    max_bytes: Count = 64 * 1024 * 1024
    """Largest request that is taken, in bytes."""
    concatenate: Boolean = True
    """Join the requests of a batch along dimension 0; otherwise each runs by itself."""


class OpenVINOSection(Section):
    """Everything under `handler.openvino`."""

    warmup: WarmupSection = WarmupSection()
    """Inputs and batch sizes that are run before the first request."""
    fallback: FallbackSection = FallbackSection()
    """What may run outside OpenVINO."""
    verify: VerifySection = VerifySection()
    """Comparison with eager PyTorch at load."""
    batching: BatchingSection = BatchingSection()
    """Batch shapes."""
    threads: Threads = "auto"
    """CPU threads of a worker; auto shares the cores among the workers."""
    image: ImageSection = ImageSection()
    """Transforms of image_classifier."""
    tensor: TensorSection = TensorSection()
    """Limits of the handler tensor."""
