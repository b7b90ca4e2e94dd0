"""The section `handler.openvino`: what happens around compilation. One pydantic model per sub-section."""

from typing import Literal

from pydantic import model_validator

from torchserve_openvino.config.fields import (
    Against,
    Axis,
    Boolean,
    Count,
    DType,
    Duration,
    Files,
    Folder,
    Freeze,
    HandlerFile,
    Kinds,
    Lengths,
    Name,
    Number,
    OnViolation,
    Paths,
    Positive,
    PythonFile,
    Share,
    Sizes,
    SomeShare,
    Threads,
    UnknownWordError,
)  # fmt: skip
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.config.sections.quantize import QuantizeSection
from torchserve_openvino.config.sections.task_sections import (
    AudioSection,
    ImageGenerationSection,
    ImageSection,
    Section,
    TensorSection,
    TextSection,
)
from torchserve_openvino.config.spelling import listed, nearest

# --- the section `handler.openvino.record`: requests that are kept, to be measured with ---------------------------


class RecordSection(Section):
    """Keeps some requests as files, for `tune --requests` and `bench --requests`. Off without a folder."""

    folder: Folder | None = None
    """Folder (absolute path) for the bodies of requests that were answered; private to the user that the workers run
    as. They hold what clients sent: see `scrub`."""
    every: Count = 100
    """One request in so many is kept."""
    most: Count = 1000
    """Largest number of files in the folder; no more are kept then, and none is removed."""
    max_mb: Positive = 100.0
    """Largest size of all files together, in 10^6 bytes."""
    scrub: PythonFile | None = None
    """Python file in the archive (`--extra-files`) with `scrub(body: bytes, content_type: str) -> bytes | None`, which
    removes what must not be kept, or the whole request (None). A request on which it fails is not kept."""

    @model_validator(mode="after")
    def _has_folder(self) -> "RecordSection":
        if self.folder is None and self.model_fields_set:
            raise ValueError("has no effect without a folder: record: {folder: /var/lib/requests}.")
        return self


# --- the section `handler.openvino`: what happens around compilation. One pydantic model per sub-section ----------


# The name that a shape may begin with; batching.buckets defines its sizes.
BATCH = "batch"


# The least and the largest value of each type that has them.
_RANGES: dict[str, tuple[float, float]] = {
    "uint8": (0, 255), **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    "float16": (-65504.0, 65504.0), "bfloat16": (-3.3895313892515355e38, 3.3895313892515355e38),
    "float32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "float64": (-1.7976931348623157e308, 1.7976931348623157e308),
}  # fmt: skip


class WarmupInput(Section):
    """One input of the model, filled with random values at warm-up."""

    name: str | None = None
    """Argument name in the model's forward; without it, inputs are passed by position."""
    shape: list[Axis]
    """Shape of one item, without the batch dimension (a leading `batch` is allowed). A name stands for a size that
    varies; `batching.dims` lists its compiled lengths."""
    dtype: DType = "float32"
    """Element type, by PyTorch's name."""
    low: Number | None = None
    """Least value. Without `low` and `high`, integers are 0 and 1 in warm-up, and floats are normally distributed."""
    high: Number | None = None
    """Upper bound, exclusive for integers; for token ids, the size of the vocabulary. Requests with integers outside
    `low` and `high` are refused."""
    pad: Number = 0.0
    """Value that fills a named dimension up to the next compiled length."""
    mask: Boolean = False
    """Whether this input masks padding. If a request lacks it, it becomes ones for the request's values and zeros for
    padding."""

    def item_shape(self) -> tuple[int | str, ...]:
        """Returns the shape of one item, with a name for each size that varies."""
        return tuple(self.shape[1:] if self.shape[:1] == [BATCH] else self.shape)

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupInput":
        if BATCH in self.item_shape():
            raise ValueError("the batch must be the first dimension: items are joined along it.")
        if self.mask and not self.item_shape():
            raise ValueError("mask: true needs a shape with the length that it masks, such as [sequence] or [128].")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}).")
        self._check_range()
        return self

    def _check_range(self) -> None:
        """Checks that the type has values in the range; without `low` or `high`, it begins at 0 or is one wide."""
        if self.low is None and self.high is None:
            return
        if self.dtype not in _RANGES:
            raise ValueError(f"{self.dtype} has no least and no largest value: leave out low and high.")
        least, largest = _RANGES[self.dtype]
        integers = isinstance(largest, int)
        low = self.low if self.low is not None else 0
        high = self.high if self.high is not None else low + (2 if integers else 1)
        for name, value, most in (("low", low, largest), ("high", high, largest + 1 if integers else largest)):
            if integers and value != int(value):
                raise ValueError(f"{name} ({value:g}) must be a whole number for {self.dtype}.")
            if not least <= value <= most:
                raise ValueError(f"{name} ({value:g}) must be from {least:g} to {most:g} for {self.dtype}.")
        if low >= high:
            raise ValueError(f"high ({high:g}) must be above 0, or low below it.")


class WarmupSection(Section):
    """Compiles before the first request: after READY nothing is compiled."""

    inputs: list[WarmupInput] = []
    """The model's inputs. Without them, those that the handler declares are used, if any."""
    batch_sizes: Sizes = "auto"
    """Batch sizes to run before READY. `auto`: every bucket up to `batchSize`."""
    samples: Files = []
    """Files in the archive (`--extra-files`), one request body each: a photo, .npy, JSON. The handler answers them
    before READY; whatever reaches its models is compiled and verified."""


class FallbackSection(Section):
    """What may run outside OpenVINO, and what happens otherwise."""

    allow: Kinds = "all"
    """Accepted kinds of fallback; `[]` accepts none."""
    min_coverage: Share = 0.0
    """Least share of operators on OpenVINO."""
    on_violation: OnViolation = "warn"
    """`refuse`: the worker does not start; later, only the request that violates the policy gets 503, and the worker is
    replaced if OpenVINO fails again in the next batch. `warn`: a log line and a metric."""
    to: Literal["eager", "inductor"] = "eager"
    """Where a partition runs that OpenVINO could not compile. Inductor needs a C++ compiler."""


class MeasureSection(Section):
    """Bounds of the measure by which a task judges bf16 and f16 that `precision: auto` tries; each task has one."""

    probability: Share | None = None
    """Classifiers, segmentation, `token_classifier`, `question_answerer`, `fill_mask`, speech: largest difference of a
    probability; where eager's first class leads by more, it must be the same. `reranker`: also the order where eager's
    is clear. `object_detector`: also label and box. `zero_shot_image_classifier`: of ten labels. Unset: 0.02."""
    cosine: Share | None = None
    """Embedders: least cosine similarity with eager's embedding, for each row. Unset: 0.999."""
    relative: Positive | None = None
    """`depth_estimator`: largest mean difference, relative to the mean of eager's. Unset: 0.01."""


class VerifySection(Section):
    """Compares the compiled model with eager PyTorch: on made-up inputs before READY, on some requests after it."""

    against: Against = "eager"
    """Reference for the comparison before READY; `off` skips it."""
    required: Boolean = False
    """`true` refuses a model that cannot be compared (no known inputs, or in training mode). `false` starts it;
    report, log and a metric say that it is not verified."""
    max_abs: Positive | None = None
    """Largest absolute difference. Unset: 1e-3 (f32), 2e-2 (f16) or 6e-2 (bf16) times the output's largest value, or
    times 0.01 if that is larger; in f32, at most one integer or boolean in 1,000 may differ."""
    min_cosine: Share | None = None
    """Least cosine similarity with eager's output, for each output."""
    min_top1: Share | None = None
    """Least share of rows whose largest value is at the same position as eager's, for each output."""
    measure: MeasureSection = MeasureSection()
    """Bounds of the task's own measure, which bf16 and f16 must meet beside the tolerance under `precision: auto`."""
    on_violation: OnViolation = "refuse"
    """`refuse`: the worker does not start. `warn`: a log line."""
    shadow: Share = 0.0
    """Share of requests that eager PyTorch answers again after the response was sent, for comparison."""
    shadow_budget: SomeShare = 0.05
    """Largest share of time spent on this comparison; 0.05 is 3 s per minute. Requests always come first."""
    on_shadow_mismatch: OnViolation = "warn"
    """`refuse` ends a worker with a wrong answer at its next request; TorchServe replaces it. `warn`: a log line and a
    metric."""
    keep_mismatches: Folder | None = None
    """Folder (absolute path) for the inputs and both answers of each mismatch, up to 16 mismatches or 256 MB."""

    @model_validator(mode="after")
    def _required_is_not_off(self) -> "VerifySection":
        if self.required and self.against == "off":
            raise ValueError("required: true and against: off exclude each other; remove one.")
        return self

    @model_validator(mode="after")
    def _has_shadow(self) -> "VerifySection":
        idle = sorted({"shadow_budget", "on_shadow_mismatch", "keep_mismatches"} & self.model_fields_set)
        if idle and "shadow" not in self.model_fields_set:
            raise ValueError(f"{idle[0]} has no effect without shadow: 0.01, which compares one request in 100.")
        return self


class BatchingSection(Section):
    """Which batch shapes are compiled, and how a batch between them is run."""

    mode: Literal["bucket", "exact", "dynamic"] = "bucket"
    """`bucket` pads a batch to the next compiled size; `exact` compiles each size; `dynamic` compiles one symbolic
    graph."""
    buckets: Sizes = "auto"
    """Compiled batch sizes. `auto`: powers of two up to `batchSize`, and `batchSize`."""
    dims: dict[str, Lengths] = {}
    """Compiled lengths of the dimensions that `warmup.inputs` names: `{sequence: [32, 128]}`. `{sequence: 128}` adds
    the powers of two from 16 below it."""
    one_graph: Freeze = "auto"
    """Whether batch sizes and lengths share one symbolic graph, and so one copy of the weights. `auto` shares on CPU
    where this saves 128 MB and costs neither coverage nor accuracy; a batch of 1 keeps its own graph.
    Convolutions along open sizes of pictures are slower, so their graphs stay separate up to 4 GiB of copies.
    `config.one_graph` in the report gives the choice and the reason."""
    outside: Literal["refuse", "compile"] = "refuse"
    """What happens to a request that fits no compiled shape: `refuse` answers 400, `compile` compiles after READY,
    counted."""
    max_shapes: Count = 16
    """Largest number of shapes compiled beyond the declared ones. One symbolic graph serves the rest; text uses it
    from the start."""


class OutputsSection(Section):
    """Which outputs may be returned."""

    non_finite: Literal["allow", "refuse"] = "allow"
    """`refuse` answers 422 to an item whose output contains NaN or infinity. `allow` sends null in their place in JSON,
    which has neither; .npy keeps them."""


class ExecutionSection(Section):
    """How one batch uses the worker's cores."""

    mode: Literal["latency", "throughput"] = "latency"
    """`latency` gives each batch all threads; `throughput` splits it over several inference streams with one copy of
    the weights."""
    streams: Threads = "auto"
    """Number of inference streams. `auto`: one per thread for up to 4 threads, above that a quarter of the threads."""


class CacheSection(Section):
    """Settings of the cache beyond `pt2.compile.options.model_caching` and `cache_dir`."""

    limit_gb: Positive = 20.0
    """Size limit of the cache, in 10^9 bytes; the least recently used entries are removed first."""
    wait_seconds: Count = 600
    """How long a worker waits for another one that compiles the same model before it compiles by itself."""
    packaged: Boolean = True
    """Whether to use the compiled graphs that `torchserve-openvino package --precompile` put into the archive."""


class WeightsSection(Section):
    """Where a checkpoint (`--serialized-file`) has the weights of the class in the model file."""

    key: Name | None = None
    """Key of the state_dict in the file, such as `model_ema`; `ema.model` is the key `model` in `ema`. Without it, the
    file as a whole is loaded, or what is under `state_dict` or `model_state_dict`."""
    strip_prefix: Name | None = None
    """Removed from the beginning of the names of weights, such as `module.` of DistributedDataParallel."""


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
    """Which outputs may be returned."""
    execution: ExecutionSection = ExecutionSection()
    """Latency or throughput."""
    compile: Paths = []
    """Modules that your handler calls besides `self.model`: `[model.encoder, pipe.unet, models[0]]`. Those that a
    `warmup.samples` file reaches need not be named. Also methods of modules, which always are: `[pipe.vae.decode]`; the
    `generate` of a model of transformers runs by graphs of its own, of the sizes that `generate` says."""
    freeze: Freeze = "auto"
    """Whether calls skip Dynamo's guards after warm-up; this saves up to a millisecond, and later changes of the model
    go unnoticed. `auto`: yes for our handlers, no for yours."""
    release_weights: Boolean = False
    """Whether to free eager PyTorch's weights after compilation; nothing can fall back to eager afterwards.
    A handler of your own also needs `freeze: true`, and inputs that are known."""
    cache: CacheSection = CacheSection()
    """Size limit of the cache, waiting time, packaged graphs."""
    quantize: QuantizeSection = QuantizeSection()
    """Weights and arithmetic of 8 or 4 bits, made by `package --quantize`."""
    precision: Literal["f32", "bf16x3", "bf16", "f16", "auto"] = "f32"
    """Precision of computation. `bf16x3` is f32 with products on AMX (docs/verification.md). `auto` takes the fastest
    precision that passes verification and is at least 10 % faster than f32. It tries a few shapes for at most 20 s
    beyond f32, or 1.5 times as long as f32 takes, once per model and machine; all workers and restarts use the result.
    Another value of `INFERENCE_PRECISION_HINT` in `pt2.compile.options.config` beside it is an error."""
    tracing: Boolean = False
    """Whether each request is a span of OpenTelemetry (extra `otel`), with its phases below it; its parent is the one
    that the header `traceparent` names. OpenTelemetry's variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`, set the
    receiver."""
    record: RecordSection = RecordSection()
    """Requests that are kept, to tune and to measure with."""
    threads: Threads = "auto"
    """CPU threads of this worker. `auto`: its share of the cores (CPU affinity and cgroup quota divided by
    `maxWorkers` or the running workers)."""
    keep: Duration | None = None
    """On `torchserve-openvino serve`: time without a request until a model's workers end (`90s`, `10m`, `2h`). The
    next request starts them again, and waits for them within `responseTimeout`. TorchServe keeps its workers."""
    op_mappings: Files = []
    """Files in the archive that add operators to OpenVINO: Python with `register_op`, or extension libraries (.so)."""
    weights: WeightsSection = WeightsSection()
    """Key and prefix of the weights in a checkpoint."""
    wrap: HandlerFile | None = None
    """Your own handler's file in the archive (`--extra-files`), with one class, or the name of one of TorchServe's
    handlers, such as `image_segmenter`. It gets our mixin, and runs in place of the archive's handler, which may be any
    of ours."""
    image: ImageSection = ImageSection()
    """Transforms of image_classifier."""
    tensor: TensorSection = TensorSection()
    """Limits of the handler tensor."""
    text: TextSection = TextSection()
    """Limits and lengths of the text tasks."""
    audio: AudioSection = AudioSection()
    """Limits and lengths of the audio tasks."""
    generate: GenerateSection = GenerateSection()
    """How a language model generates text."""
    image_generation: ImageGenerationSection = ImageGenerationSection()
    """Sizes and limits of image_generator."""

    @model_validator(mode="after")
    def _folded_photos_have_one_input(self) -> "OpenVINOSection":
        if self.image.fold and self.warmup.inputs:
            raise ValueError("image.fold: true already defines the model's input, 8-bit pixels; remove warmup.inputs.")
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
            raise UnknownWordError(
                f"warmup.inputs names the dimension {name!r}, for which batching.dims has no length; "
                f"for example dims: {{{name}: [32, 64, 128]}}.",
                hint,
            )
        for name in sorted(self.batching.dims.keys() - named):
            raise UnknownWordError(
                f"batching.dims has {name!r}, which no shape in warmup.inputs names"
                + (f"; they name {listed(sorted(named))}." if named else "."),
                nearest(name, named),
            )
        return self
