"""The section `handler.openvino`: what happens around compilation. One pydantic model per sub-section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from torchserve_openvino.config.fields import (
    Against,
    Axis,
    Boolean,
    Channels,
    Count,
    DType,
    Files,
    Folder,
    Freeze,
    Kinds,
    Lengths,
    Misspelt,
    Number,
    OnViolation,
    Paths,
    Positive,
    Share,
    Sizes,
    SomeShare,
    Threads,
)  # fmt: skip
from torchserve_openvino.config.spelling import listed, nearest

# The name that a shape may begin with; batching.buckets says which sizes it takes.
BATCH = "batch"


class Section(BaseModel):
    """Base: no unknown keys, no change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WarmupInput(Section):
    """One input of the model, filled with random values at warm-up."""

    name: str | None = None
    """Keyword of the model's forward; positional in the order given when absent."""
    shape: list[Axis]
    """Shape of one item, without the batch dimension (a leading `batch` is understood). A name stands for a size that
    varies; `batching.dims` lists what it is compiled for."""
    dtype: DType = "float32"
    """PyTorch's name of the element type."""
    low: Number | None = None
    """Least value; for integers 0, for floats a normal distribution, when neither bound is given."""
    high: Number | None = None
    """Upper bound; exclusive for integers. For token ids: the size of the vocabulary. A request whose integers lie
    outside `low` and `high` is refused."""
    pad: Number = 0.0
    """What fills a named dimension up to the next compiled length."""
    mask: Boolean = False
    """Whether this input says what is real: made of ones, and zeros for the padding, where a request lacks it."""

    def item_shape(self) -> tuple[int | str, ...]:
        """Shape of one item, a name for each size that varies."""
        return tuple(self.shape[1:] if self.shape[:1] == [BATCH] else self.shape)

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupInput":
        if BATCH in self.item_shape():
            raise ValueError("the batch must be the first dimension: items are joined along it.")
        if self.mask and not self.item_shape():
            raise ValueError("mask: true needs a shape with the length that it masks, such as [sequence] or [128].")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}).")
        return self


class WarmupSection(Section):
    """Compiles before the first request: after READY nothing is compiled."""

    inputs: list[WarmupInput] = []
    """The model's inputs; empty leaves it to the handler, which may know them."""
    batch_sizes: Sizes = "auto"
    """Batch sizes to run; auto takes every bucket up to batchSize."""
    samples: list[str] = []
    """Files of the archive (--extra-files), a request body each: a photo, .npy, JSON. Run and verified as well."""


class FallbackSection(Section):
    """What may run outside OpenVINO, and what happens otherwise."""

    allow: Kinds = "all"
    """Causes of fallback that are accepted; an empty list accepts none."""
    min_coverage: Share = 0.0
    """Least share of operators on OpenVINO, 0..1."""
    on_violation: OnViolation = "warn"
    """refuse: the worker does not start, and one that falls short later answers 503 and is replaced; warn: a line in
    the log, and a metric."""
    to: Literal["eager", "inductor"] = "eager"
    """Who runs a partition that OpenVINO could not compile. Inductor needs a C++ compiler."""


class VerifySection(Section):
    """Compares the compiled model with eager PyTorch: on made-up inputs before READY, on some requests after it."""

    against: Against = "eager"
    """off skips the comparison."""
    required: Boolean = False
    """true: the worker does not start where the comparison can't be made (no inputs are known, or the model is in
    training mode); false: it starts, and report, log and a metric say that it was not verified."""
    max_abs: Positive | None = None
    """Largest absolute difference that is accepted; None takes a tolerance by precision."""
    min_cosine: Share | None = None
    """Least cosine similarity of each output with eager's."""
    min_top1: Share | None = None
    """Least share of rows whose largest value is at the same place as eager's."""
    on_violation: OnViolation = "refuse"
    """refuse: the worker does not start; warn: a line in the log."""
    shadow: Share = 0.0
    """Share of requests, 0..1, that eager PyTorch answers once more after the answer went out, for comparison."""
    shadow_budget: SomeShare = 0.05
    """Largest share of time that is spent on that; 0.05 is 3 s of a minute. Requests in progress always come first."""
    on_shadow_mismatch: OnViolation = "warn"
    """refuse: the worker ends at the next request, to be replaced; warn: a line in the log, and a metric."""
    keep_mismatches: Folder | None = None
    """Folder (an absolute path) that takes the inputs and both answers of each mismatch, up to 16 of them or 256 MB."""

    @model_validator(mode="after")
    def _required_is_not_off(self) -> "VerifySection":
        if self.required and self.against == "off":
            raise ValueError("required: true and against: off exclude each other; remove one.")
        return self


class BatchingSection(Section):
    """Which batch shapes are compiled, and how a batch between them is run."""

    mode: Literal["bucket", "exact", "dynamic"] = "bucket"
    """bucket pads a batch to the next compiled size; exact compiles each size; dynamic compiles one symbolic graph."""
    buckets: Sizes = "auto"
    """Compiled batch sizes; auto takes the powers of two up to batchSize, and batchSize."""
    dims: dict[str, Lengths] = {}
    """Compiled lengths of the dimensions that `warmup.inputs` names: `{sequence: [32, 128]}`, or the largest alone."""
    one_graph: Freeze = "auto"
    """Whether compiled batch sizes and lengths share one graph of symbolic sizes, and with it one copy of the weights.
    auto: all but a batch of 1, on CPU, where that saves 128 MB and loses neither coverage nor accuracy."""
    outside: Literal["refuse", "compile"] = "refuse"
    """A request that fits no compiled shape: refuse answers 400, compile compiles for it after READY, counted."""
    max_shapes: Count = 16
    """How many shapes are compiled where none are declared, or beyond those that are; further ones share one graph of
    symbolic sizes."""


class OutputsSection(Section):
    """What may be answered."""

    non_finite: Literal["allow", "refuse"] = "allow"
    """refuse answers 422 to an item whose output holds NaN or infinity."""


class ExecutionSection(Section):
    """How one batch uses the worker's cores."""

    mode: Literal["latency", "throughput"] = "latency"
    """latency gives each batch all threads; throughput splits it over several inference streams with one copy of the
    weights."""
    streams: Threads = "auto"
    """How many parts a batch is split into; auto takes one for each thread, up to 4."""


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
    fold: Boolean = False
    """Scale, normalise and take the softmax inside the OpenVINO graph, on 8-bit pixels: faster, and 4 times less to
    copy. Photos only: ready tensors (nested lists) are refused then."""
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


class CacheSection(Section):
    """More about the cache that `pt2.compile.options.model_caching` and `cache_dir` switch on."""

    limit_gb: Positive = 20.0
    """Size of all entries together, in 10**9 bytes; the least recently used go first."""
    wait_seconds: Count = 600
    """How long a worker waits for another one that compiles the same model, before it compiles by itself."""
    packaged: Boolean = True
    """Use the compiled graphs that `torchserve-openvino package --precompile` put into the archive."""


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
    outputs: OutputsSection = OutputsSection()
    """What may be answered."""
    execution: ExecutionSection = ExecutionSection()
    """Latency or throughput."""
    compile: Paths = []
    """What a handler calls besides `model`, compiled by itself: `[model.encoder, pipe.unet, models[0]]`. Modules that
    a sample of `warmup.samples` shows to be called need not be named."""
    freeze: Freeze = "auto"
    """Whether calls skip Dynamo's guards after warm-up: about a millisecond less, and a model that changes later is not
    seen to. auto: yes for image_classifier and tensor, no for a handler of your own."""
    release_weights: Boolean = False
    """Free eager PyTorch's copy of the weights after compilation; then nothing can fall back to eager later."""
    cache: CacheSection = CacheSection()
    """Size of the cache, waiting, packaged graphs."""
    precision: Literal["f32", "bf16", "f16", "auto"] = "f32"
    """What the device computes in, where `pt2.compile.options.config` names no INFERENCE_PRECISION_HINT. auto measures
    what the device has and takes the fastest whose answers pass verification, if it is at least 10 % faster for sure;
    it decides once for a model and machine, keeps that with the cache, and all workers and restarts follow."""
    threads: Threads = "auto"
    """CPU threads of a worker; auto shares the cores among the workers."""
    op_mappings: Files = []
    """Files of the archive that teach OpenVINO operators: Python with register_op, or extension libraries (.so)."""
    image: ImageSection = ImageSection()
    """Transforms of image_classifier."""
    tensor: TensorSection = TensorSection()
    """Limits of the handler tensor."""

    @model_validator(mode="after")
    def _folded_photos_have_one_input(self) -> "OpenVINOSection":
        if self.image.fold and self.warmup.inputs:
            raise ValueError("image.fold: true makes the model's input itself, 8-bit pixels; remove warmup.inputs.")
        return self

    @model_validator(mode="after")
    def _released_weights_compile_nothing(self) -> "OpenVINOSection":
        if self.release_weights and self.batching.outside == "compile":
            raise ValueError("release_weights: true leaves no weights for batching.outside: compile; choose one.")
        return self

    @model_validator(mode="after")
    def _released_weights_check_nothing(self) -> "OpenVINOSection":
        if self.release_weights and self.verify.shadow:
            raise ValueError(
                "release_weights: true leaves no weights for verify.shadow; set verify.shadow: 0, or release_weights: "
                "false."
            )
        return self

    @model_validator(mode="after")
    def _dimensions_have_lengths(self) -> "OpenVINOSection":
        named = {size for spec in self.warmup.inputs for size in spec.item_shape() if isinstance(size, str)}
        for name in sorted(named - self.batching.dims.keys()):
            hint = nearest(name, self.batching.dims)
            raise Misspelt(
                f"warmup.inputs names the dimension {name!r}, for which batching.dims has no length; "
                f"for example dims: {{{name}: [32, 64, 128]}}.",
                hint,
            )
        for name in sorted(self.batching.dims.keys() - named):
            raise Misspelt(
                f"batching.dims has {name!r}, which no shape in warmup.inputs names"
                + (f"; they name {listed(sorted(named))}." if named else "."),
                nearest(name, named),
            )
        return self
