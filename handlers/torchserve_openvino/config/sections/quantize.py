"""The section `handler.openvino.quantize`: weights and arithmetic of 8 or 4 bits, made while an archive is packaged."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from torchserve_openvino.config.fields import Boolean, Count, Integer, Share
from torchserve_openvino.config.sections.task_sections import Section

Method = Literal["int8", "int8_weights", "int4_weights"]
Metric = Literal["auto", "top1", "f1", "cosine", "agreement"]


class CalibrationSection(Section):
    """Requests from which the ranges of activations are learnt."""

    data: str | None = None
    """Folder of request bodies (photos, JSON, .npy, ...), which go through the handler's own decoding, or a .npz file
    with an array `[items, ...]` for each input of the model; relative to the YAML. Needed by `int8`."""
    samples: Count = 300
    """Most requests that are used, the first by name."""


class EvaluationSection(Section):
    """Requests on which the accuracy is measured."""

    data: str | None = None
    """As `calibration.data`, which is used if this is unset. Others than those prove more."""
    labels: str | None = None
    """JSON file with the class of each request: `{file name: class}` for a folder, a list for a .npz file. Without it,
    the answers of the model in f32 are what is right."""
    samples: Count = 1000
    """Most requests that are used, the first by name."""
    metric: Metric = "auto"
    """`top1`: share of right classes. `f1`: mean of the classes' F1. `agreement`: share of classes as in f32. `cosine`:
    mean cosine similarity with the outputs in f32. `auto`: `top1` with labels, without them `agreement` for classifiers
    (by the handler's name, or with an index_to_name.json), else `cosine`."""


class IgnoredSection(Section):
    """What stays in f32."""

    names: tuple[str, ...] = ()
    """Regular expressions for names of layers, as the table of `package --quantize` shows them."""
    types: tuple[str, ...] = ()
    """Operators, such as `aten.softmax.int`, or NNCF's names of them."""


class QuantizeSection(Section):
    """What `package --quantize` makes."""

    method: Method | None = None
    """`int8`: weights and activations in 8 bits, fastest with VNNI or AMX. `int8_weights`, `int4_weights`: only the
    weights, for models whose time goes into reading them."""
    calibration: CalibrationSection = CalibrationSection()
    """For `int8`, and for `int4_weights` that are to fit the data."""
    preset: Literal["performance", "mixed"] = "performance"
    """`mixed` quantizes activations asymmetrically: a little slower, often more accurate."""
    fast_bias_correction: Boolean = True
    """`false` corrects biases layer by layer: slower to make, sometimes more accurate."""
    smooth_quant: Share | None = None
    """Moves the range of activations into the weights, by this share, in models with attention. Unset: not at all."""
    group_size: Annotated[Integer, Field(ge=-1)] | None = None
    """For `int4_weights`: how many weights of a row share a scale; -1 for the whole row. Unset: 64, or the largest
    power of two from 16 that divides all rows."""
    keep_f32: Boolean = False
    """Whether the model in f32 stays in the archive. Then `precision: auto` serves the fastest that passes, any other
    `precision` the one in f32; where it is unset, the quantized one is served."""
    ignored: IgnoredSection = IgnoredSection()
    """Layers that stay as they are."""
    evaluation: EvaluationSection = EvaluationSection()
    """What is compared."""
    max_drop: Share = 0.01
    """Largest loss of the metric against f32. Above it, the layers that cost the most stay in f32; if that does not
    help, there is no archive."""

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"must be a mapping, such as {{method: {value}, calibration: {{data: photos}}}}.")
        return value

    @model_validator(mode="after")
    def _has_data(self) -> "QuantizeSection":
        if self.method == "int8" and self.calibration.data is None:
            raise ValueError("method: int8 needs calibration.data: a folder of requests, or a .npz file.")
        if self.method is not None and self.evaluation.data is None and self.calibration.data is None:
            raise ValueError("evaluation.data: a folder of requests, or a .npz file, is needed to prove the accuracy.")
        return self
