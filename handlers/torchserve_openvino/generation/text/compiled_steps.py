"""The engine `compile`: steps of a model's compiled graphs, and the proof that they are eager PyTorch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.compiled.layout import GraphSizes
from torchserve_openvino.generation.text.eager import EagerSteps, first_token
from torchserve_openvino.generation.text.engine import Sampling, Stream
from torchserve_openvino.generation.text.engine_settings import check_device
from torchserve_openvino.generation.text.expected import RIVALS, Expected, Nearness, nearness_of
from torchserve_openvino.generation.text.exporting.architecture import USUAL_LENGTH, bounds
from torchserve_openvino.generation.text.stepping_engine import SteppingEngine, Steps

_KEY = "handler.openvino.generate"
# Unset, sequences are shorter than with pages: each step computes with all places, filled or not.
_USUAL_PLACES = min(USUAL_LENGTH, 1024)
# Lengths of prompts in which whole calls are compiled: powers of this from its square on.
_GROWTH = 4


class CompiledSteps:
    """Steps of compiled graphs; implements `stepping.Steps`.

    Args:
        generation: The graphs.
    """

    def __init__(self, generation: CompiledGeneration) -> None:
        self.generation = generation
        self.first = first_token(generation.model) if generation.layout.encodes else None

    def begin(self, prompt: Sequence[int]) -> "CompiledWork":
        """Returns a sequence for which nothing was computed yet."""
        return CompiledWork(self, prompt)


class CompiledWork:
    """One sequence; implements `stepping.Work`.

    Attributes:
        tokens: Tokens of the decoder.
    """

    def __init__(self, steps: CompiledSteps, prompt: Sequence[int]) -> None:
        self._generation, self._prompt = steps.generation, torch.tensor([list(prompt)])
        self.tokens = list(prompt) if steps.first is None else [steps.first]
        self._fed = 0
        self._cache: Any = None

    def advance(self) -> Tensor | None:
        """Computes the logits after the last token; None if a long prompt takes further calls."""
        generation = self._generation
        encodes = generation.layout.encodes
        if self._cache is None:
            self._cache = generation.cache(1, generation.encode(self._prompt) if encodes else None)
        source = torch.ones_like(self._prompt) if encodes else None
        logits, count = generation.step(self._cache, torch.tensor([self.tokens[self._fed :]]), source=source)
        self._fed += count
        return logits[0] if self._fed == len(self.tokens) else None


# --- what is compiled -------------------------------------------------------------------------------------------


def places_of(config: Any, max_length: int | None) -> int:
    """Returns the longest sequence to serve, in tokens, prompt and answer together.

    Args:
        config: The model's configuration (``transformers.PreTrainedConfig``).
        max_length: `generate.max_length`.

    Raises:
        ConfigError: The model was not made for such lengths.
    """
    limits = dict(bounds(config, paged=False))
    if max_length is None:
        own = getattr(config, "n_positions", _USUAL_PLACES)
        return min([_USUAL_PLACES, own, *limits.values()])
    for reason, bound in limits.items():
        if max_length > bound:
            raise ConfigError(
                f"is {max_length}, but {config.model_type} {reason}: set {bound} or less.", key=f"{_KEY}.max_length"
            )
    return max_length


def sizes_of(config: Any, section: GenerateSection, places: int) -> GraphSizes:
    """Returns what to compile for sequences of up to ``places`` tokens."""
    if getattr(config, "is_encoder_decoder", False):
        return GraphSizes(places, texts=(*_lengths(places - 1), places))
    most = min(section.step_tokens, places)
    return GraphSizes(places, steps=tuple(length for length in (*_lengths(most - 1), most) if length > 1))


def _lengths(most: int) -> list[int]:
    lengths = [_GROWTH**2]
    while lengths[-1] * _GROWTH <= most:
        lengths.append(lengths[-1] * _GROWTH)
    return [length for length in lengths if length <= most]


def check(section: GenerateSection, device: str, why: str = "") -> None:
    """Refuses settings that belong to the engine `genai`.

    Args:
        section: `handler.openvino.generate`.
        device: OpenVINO device.
        why: Why this engine was chosen.

    Raises:
        ConfigError: With the key, and what to do.
    """
    check_device(section, device)
    for key, wrong in {
        "weights": section.weights in {"int8", "int4"},
        "kv_cache": section.kv_cache not in {None, "f32"},
        "dynamic_quantization": section.dynamic_quantization,
        "prefix_caching": section.prefix_caching,
        "prompt_lookup_tokens": section.prompt_lookup_tokens,
    }.items():
        if wrong:
            raise ConfigError(
                f"is {getattr(section, key)}, which the engine compile does not do: remove it. Why this engine: "
                f"{why or 'generate.engine'}.", key=f"{_KEY}.{key}",
            )  # fmt: skip


def running_at_once(section: GenerateSection, of_one: int) -> int:
    """Returns how many sequences have memory for their keys and values at once.

    Args:
        section: `handler.openvino.generate`.
        of_one: Bytes of one sequence.

    Raises:
        ConfigError: `cache_gb` has no room for one.
    """
    usual = 8
    if section.cache_gb is None:
        return usual
    if (count := int(section.cache_gb * 1e9 // of_one)) < 1:
        raise ConfigError(
            f"is {section.cache_gb:g}; one sequence takes {of_one / 1e9:.3g} GB. Set that much, or a smaller "
            "max_length.", key=f"{_KEY}.cache_gb",
        )  # fmt: skip
    return count


# --- the proof --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What eager PyTorch generated for one prompt.

    Attributes:
        expected: Its tokens, always the most probable ones.
        logits: After each, float32 ``[tokens, vocabulary]``.
    """

    expected: Expected
    logits: Tensor


def referred(steps: EagerSteps, prompts: Sequence[Sequence[int]], count: int) -> list[Reference]:
    """Generates ``count`` tokens for each prompt in eager PyTorch, without an end-of-text token's effect."""
    references = []
    for prompt in prompts:
        tokens: list[int] = []
        rows: list[Tensor] = []
        for logits in _logits(steps, prompt, tokens, count):
            rows.append(logits)
            tokens.append(int(logits.argmax()))
        best = torch.stack(rows).log_softmax(-1).topk(min(RIVALS, rows[0].numel()))
        rivals = tuple(
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        references.append(Reference(Expected(tuple(prompt), tuple(tokens), rivals), torch.stack(rows)))
    return references


def near(steps: Steps, references: Sequence[Reference]) -> Nearness:
    """Compares the logits of compiled graphs with eager PyTorch's, after the tokens that that generated."""
    pairs = []
    for reference in references:
        tokens = list(reference.expected.tokens)
        got = torch.stack(list(_logits(steps, reference.expected.prompt, tokens, len(tokens))))
        pairs.append((got.numpy(), reference.logits.numpy()))
    return nearness_of(pairs)


def _logits(steps: Steps, prompt: Sequence[int], tokens: Sequence[int], count: int) -> Any:
    """Yields logits for each of ``count`` tokens, of which those before it are read from ``tokens`` when it is due."""
    with torch.no_grad():
        work = steps.begin(prompt)
        for index in range(count):
            while (logits := work.advance()) is None:
                pass
            yield logits.float()
            work.tokens.append(tokens[index])


class FullSequence:
    """Continues answers of a model with an encoder, whose prompt does not hold them; for `proof.prove`.

    Args:
        engine: Serves nobody yet.
        count: Tokens of each whole answer.
    """

    def __init__(self, engine: SteppingEngine, count: int) -> None:
        self._engine, self._count = engine, count
        self.max_length = engine.max_length
        self.load, self.close = engine.load, engine.close

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Stream:
        """Starts a prompt, followed by those tokens of its answer that ``max_tokens`` leaves out."""
        begin = len(prompt) - (self._count - sampling.max_tokens)
        return self._engine.resume(prompt[:begin], prompt[begin:], sampling)
