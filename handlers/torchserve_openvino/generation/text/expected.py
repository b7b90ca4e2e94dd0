"""What eager PyTorch generates, and how near an exported model's logits come: the reference of the proof."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchserve_openvino.backend.runtime.build import compile_as_is
from torchserve_openvino.backend.runtime.crashes.journal import Journal
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.generation.text.exporting.exported_language_model import TOKENS, cache_argument
from torchserve_openvino.report.progress import begin_step

# Lengths of made-up prompts: shorter than a page of the cache, across one, several pages, several steps.
LENGTHS = (3, 17, 40, 300)
# How many of the most probable tokens of each step are kept, to judge a difference by.
RIVALS = 8


@dataclass(frozen=True)
class Expected:
    """What eager PyTorch generated for one prompt, always taking the most probable token.

    Attributes:
        prompt: Token ids.
        tokens: Generated token ids.
        rivals: For each of them the most probable tokens at its place with their natural log probabilities, most
            probable first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rivals: tuple[tuple[tuple[int, float], ...], ...]

    def gap(self, index: int, token: int) -> float | None:
        """Returns how much less probable than the best a token is, in log probability; None if it is no rival."""
        best = self.rivals[index][0][1]
        return next((best - logprob for rival, logprob in self.rivals[index] if rival == token), None)

    def first(self, count: int) -> "Expected":
        """Returns the same with the first tokens only."""
        return Expected(self.prompt, self.tokens[:count], self.rivals[:count])

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Expected":
        """Reads one back from JSON. Raises LookupError, TypeError or ValueError if it is not complete."""
        rivals = tuple(tuple((int(token), float(value)) for token, value in rivals) for rivals in plain["rivals"])
        return cls(tuple(map(int, plain["prompt"])), tuple(map(int, plain["tokens"])), rivals)


@dataclass(frozen=True)
class Nearness:
    """How near logits came to eager PyTorch's, over all tokens of the prompts.

    Attributes:
        cosine: Mean cosine similarity of the logits after a token.
        least_cosine: The least of them.
        max_abs: Largest difference of a logit.
        scale: Largest absolute logit of eager PyTorch.
        top1: Share of tokens after which both find the same token most probable.
    """

    cosine: float
    least_cosine: float
    max_abs: float
    scale: float
    top1: float

    def to_plain(self) -> dict[str, float]:
        """Returns them as JSON."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Nearness":
        """Reads one back. Raises LookupError, TypeError or ValueError if it is not complete."""
        return cls(**{field.name: float(plain[field.name]) for field in fields(cls)})


def made_up(vocabulary: int, special: frozenset[int], longest: int) -> list[tuple[int, ...]]:
    """Returns prompts of random tokens, the same at each call.

    Args:
        vocabulary: Token ids are less than this.
        special: Tokens that do not occur in them.
        longest: Most tokens of a prompt.
    """
    draw = random.Random(0)
    usual = [token for token in range(vocabulary) if token not in special] or [0]
    lengths = sorted({min(length, longest) for length in LENGTHS})
    return [tuple(draw.choices(usual, k=length)) for length in lengths]


def proof_prompts(
    configured: Sequence[Sequence[int]], proof_tokens: int, length: int, vocabulary: int, special: frozenset[int]
) -> tuple[list[tuple[int, ...]], int]:
    """Returns the prompts of a proof, and how many tokens each generates.

    Args:
        configured: Prompts of the configuration; made up if there are none.
        proof_tokens: `generate.proof_tokens`.
        length: Longest sequence of the engine.
        vocabulary: Token ids are less than this.
        special: Tokens that do not occur in made-up prompts.

    Raises:
        ConfigError: A given prompt is too long.
    """
    count = min(proof_tokens, length - 1)
    prompts = [tuple(prompt) for prompt in configured if prompt] or made_up(vocabulary, special, length - count)
    if (longest := max(map(len, prompts))) + count > length:
        raise ConfigError(
            f"has a prompt of {longest} tokens, which with {count} more (generate.proof_tokens) exceeds "
            f"{length} (generate.max_length).",
            key="handler.openvino.generate.proof_prompts",
        )
    return prompts, count


def expect(model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int) -> list[Expected]:
    """Generates with eager PyTorch, prompt by prompt, without an end-of-text token's effect.

    Args:
        model: A causal language model of transformers.
        prompts: Token ids.
        tokens: How many to generate.
    """
    expected = []
    for position, prompt in enumerate(prompts, 1):
        begin_step("generating in eager PyTorch, prompt", position, len(prompts))
        expected.append(_generated(model, tuple(prompt), tokens))
    return expected


def _generated(model: nn.Module, prompt: tuple[int, ...], count: int) -> Expected:
    ids, past = torch.tensor([prompt]), None
    # The output has the name of the argument.
    name = cache_argument(model)
    tokens: list[int] = []
    rivals = []
    with torch.inference_mode():
        for _ in range(count):
            output = model(input_ids=ids, use_cache=True, **{name: past})
            past = output[name]
            best = torch.log_softmax(output.logits[0, -1].float(), -1).topk(min(RIVALS, output.logits.shape[-1]))
            rivals.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            tokens.append(rivals[-1][0][0])
            ids = torch.tensor([tokens[-1:]])
    return Expected(prompt, tuple(tokens), tuple(rivals))


def nearness(
    model: nn.Module, exported: Path, prompts: Sequence[Sequence[int]], device: str, properties: Mapping[str, Any],
    journal: Journal | None = None,
) -> Nearness:  # fmt: skip
    """Compares the logits of an exported model with those of eager PyTorch, for all tokens of the prompts.

    A prompt goes in by halves, so that the second one reads the keys and values of the first from the cache, in the
    precision of the cache.

    Args:
        model: A causal language model of transformers.
        exported: The exported model's file (.xml).
        prompts: Token ids.
        device: OpenVINO device.
        properties: With which it is compiled.
        journal: Remembers what is compiled, in case that the process dies.

    Raises:
        CompileDiedError: An earlier process died of it.
    """
    request = compile_as_is(exported, device, properties, journal, "language model").create_infer_request()
    pairs = []
    for position, prompt in enumerate(prompts, 1):
        begin_step("comparing logits with eager PyTorch's, prompt", position, len(prompts))
        request.reset_state()
        ids, half = np.array([prompt], dtype=np.int64), -(-len(prompt) // 2)
        parts = [logits(request, ids[:, :half])]
        if half < len(prompt):
            parts.append(logits(request, ids[:, half:], np.ones_like(ids)))
        got = np.concatenate(parts, axis=1)[0]
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float().numpy()
        pairs.append((got, expected))
    return nearness_of(pairs)


def nearness_of(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Nearness:
    """Compares logits.

    Args:
        pairs: Logits to judge, and those of eager PyTorch, float32 ``[tokens, vocabulary]`` each.
    """
    cosines: list[float] = []
    differences: list[float] = []
    scales: list[float] = []
    same: list[bool] = []
    for got, expected in pairs:
        norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
        cosines += ((got * expected).sum(-1) / np.maximum(norms, 1e-30)).tolist()
        differences.append(float(np.abs(got - expected).max()))
        scales.append(float(np.abs(expected).max()))
        same += (got.argmax(-1) == expected.argmax(-1)).tolist()
    # NumPy's minimum and maximum keep a NaN.
    return Nearness(
        float(np.mean(cosines)), float(np.min(cosines)), float(np.max(differences)), max(scales), float(np.mean(same))
    )


def logits(request: Any, ids: np.ndarray, mask: np.ndarray | None = None) -> Any:
    """Runs an exported model on new tokens after those that its state holds.

    Args:
        request: An infer request of the model.
        ids: ``[batch, new tokens]``, int64.
        mask: ``[batch, past and new tokens]``, int64: 0 for padding; None if there is none, and no past.

    Returns:
        ``[batch, new tokens, vocabulary]``, float32; the request's own memory is copied.
    """
    seen = np.ones_like(ids) if mask is None else mask
    positions = np.maximum(seen.cumsum(-1) - 1, 0)[:, -ids.shape[1] :]
    values = (ids, seen, positions)
    named = dict(zip(TOKENS, values, strict=True))
    named["beam_idx"] = np.arange(ids.shape[0], dtype=np.int32)
    known = {name for port in request.model_inputs for name in port.get_names()}
    request.infer({name: value for name, value in named.items() if name in known})
    return request.get_tensor("logits").data.copy()
