"""The section `handler.openvino.generate`: how a language model generates text."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from torchserve_openvino.config.fields import Boolean, Count, Integer, Positive
from torchserve_openvino.config.sections.task_sections import Section

WeightFormat = Literal["auto", "f32", "bf16", "int8", "int4"]
CachePrecision = Literal["f32", "bf16", "u8"]


class GenerateSection(Section):
    """Text generation: the engine, its precision and its limits."""

    engine: Literal["genai", "compile"] | None = None
    """`genai` generates with OpenVINO GenAI: prompts of different lengths share each step. `compile` compiles the
    model's own graphs, for encoders with decoders and for whatever else GenAI does not take; each step computes one
    sequence. Unset: `genai` where openvino-genai is installed and takes the model, else `compile`."""
    weights: WeightFormat = "auto"
    """Format of the weights. `auto` keeps those of a GPTQ or AWQ checkpoint as they are, and is `f32` for others. `f32`
    dequantizes such a checkpoint. `bf16` also computes in bf16; `int8` and `int4` compress the weights of linear layers
    (NNCF). All but `bf16` compute in f32."""
    group_size: Annotated[Integer, Field(ge=-1)] | None = None
    """For `weights: int4`: how many weights of a row share a scale; -1 for the whole row. Unset: 64, or the largest
    power of two from 16 that divides all rows."""
    kv_cache: CachePrecision | None = None
    """Precision of the cached keys and values. Unset: `bf16` for `weights: bf16`, else `f32`; `u8` goes with all
    weights."""
    dynamic_quantization: Boolean = False
    """Whether layers with compressed weights may also quantize their inputs to 8 bits at each step: faster, less
    exact."""
    max_tokens: Count = 512
    """Most tokens of one answer; also the number for a request that names none."""
    max_length: Count | None = None
    """Longest sequence in tokens, prompt and answer together. Unset: what the model was made for, up to 4,096; with
    `compile`, which computes with the whole length at each step, up to 1,024."""
    cache_gb: Positive | None = None
    """Memory for cached keys and values, in 10^9 bytes. Unset: eight sequences of `max_length`; of `genai`
    up to a quarter of the free memory, at least one."""
    max_waiting: Count = 256
    """Most prompts that wait for room in the cache; one more answers 503."""
    step_tokens: Count = 256
    """Most tokens that one step computes. A longer prompt takes several steps, between which others go on."""
    prefix_caching: Boolean | None = None
    """Whether prompts that begin alike share what was computed for their common beginning. Unset: true, but false with
    `compile` or `prompt_lookup_tokens`, which do not have it."""
    prompt_lookup_tokens: Annotated[Integer, Field(ge=0, le=32)] = 0
    """How many tokens each step guesses from what followed the last ones before, in the prompt or the answer. The model
    checks them all at once, so that answers stay the same. Faster for one prompt at a time whose answer repeats parts
    of it, as edits do; slower for many prompts at once. Only with `genai`."""
    proof_tokens: Count = 24
    """Tokens that are compared with eager PyTorch before READY, for each of the prompts."""
    proof_prompts: tuple[str, ...] = ()
    """Texts to compare with. Unset: random tokens, in four lengths."""

    @property
    def computation(self) -> Literal["f32", "bf16"]:
        """The precision of computation."""
        return "bf16" if self.weights == "bf16" else "f32"

    @property
    def cached(self) -> CachePrecision:
        """The precision of cached keys and values."""
        return self.kv_cache or self.computation

    @property
    def shares_prefixes(self) -> bool:
        """Whether the engine `genai` keeps pages of prompts for others that begin alike."""
        return not self.prompt_lookup_tokens if self.prefix_caching is None else self.prefix_caching

    @model_validator(mode="after")
    def _caches_what_is_computed(self) -> "GenerateSection":
        if self.cached not in {self.computation, "u8"}:
            raise ValueError(
                f"kv_cache: {self.kv_cache} does not go with weights: {self.weights}, which computes in "
                f"{self.computation}; set kv_cache: {self.computation} or u8."
            )
        return self

    @model_validator(mode="after")
    def _answers_fit(self) -> "GenerateSection":
        if self.max_length is not None and self.max_tokens >= self.max_length:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must be less than max_length ({self.max_length}), which includes the "
                "prompt."
            )
        return self

    @model_validator(mode="after")
    def _guesses_fit(self) -> "GenerateSection":
        if not self.prompt_lookup_tokens:
            return self
        if self.prefix_caching:
            raise ValueError(
                "prompt_lookup_tokens does not go with prefix_caching: OpenVINO GenAI 2026.4 gives wrong tokens with "
                "both. Remove one of them."
            )
        if self.prompt_lookup_tokens >= self.step_tokens:
            raise ValueError(
                f"prompt_lookup_tokens ({self.prompt_lookup_tokens}) must be less than step_tokens "
                f"({self.step_tokens}): a step computes the guesses and one token more."
            )
        return self

    @model_validator(mode="after")
    def _groups_are_of_int4(self) -> "GenerateSection":
        if self.group_size is not None and self.weights != "int4":
            raise ValueError(f"group_size belongs to weights: int4, not {self.weights}; remove it.")
        if self.group_size == 0:
            raise ValueError("group_size must be -1 or at least 1, not 0.")
        return self
