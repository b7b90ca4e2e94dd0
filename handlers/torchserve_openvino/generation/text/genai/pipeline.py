"""OpenVINO GenAI's continuous batching, behind the few calls that the engine makes; for one thread at a time.

GenAI gets tokens and gives tokens: it never sees a tokenizer.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.genai.engine_messages import End, SequenceUpdate

# Tokens in one page of the cache on CPU; tests/contract pins it.
PAGE = 32
# Tokens that are looked for to guess what follows; if they were not there before, then fewer of them, down to one.
_LONGEST_MATCH = 3
_NO_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class PipelineSettings:
    """How the pipeline is built.

    Attributes:
        device: OpenVINO device.
        properties: OpenVINO properties, such as ``INFERENCE_PRECISION_HINT``.
        pages: Pages of the cache, each for `PAGE` tokens of one sequence.
        step_tokens: Most tokens that one step computes.
        prefix_caching: Whether pages of prompts that begin alike are shared.
        guesses: How many tokens each step guesses from what followed the last ones before; 0 for none. Each sequence
            needs room for as many tokens beyond its end.
    """

    device: str
    properties: Mapping[str, Any]
    pages: int
    step_tokens: int
    prefix_caching: bool
    guesses: int = 0


class _Words:
    """GenAI's words for how a sequence does; looked up once, since each step of each sequence needs them."""

    def __init__(self, genai: Any) -> None:
        status, reason = genai.GenerationStatus, genai.GenerationFinishReason
        self.ignored, self.finished = status.IGNORED, status.FINISHED
        self.reasons = {reason.STOP: End.STOP, reason.LENGTH: End.LENGTH}


class Running:
    """One sequence that runs in the pipeline.

    Attributes:
        cancelled: Whether `cancel` was called.
    """

    def __init__(self, words: _Words, number: int, handle: Any, eos: frozenset[int]) -> None:
        self._words, self._number, self._handle, self._eos = words, number, handle, eos
        self.cancelled = False

    def news(self) -> SequenceUpdate:
        """Returns what is new; never waits."""
        tokens: list[int] = []
        logprobs: list[float] = []
        end, guessed = None, 0
        # The status is read first: what is pushed with the end is then certain to be read below.
        status = self._handle.get_status()
        while self._handle.can_read():
            for output in self._handle.read().values():
                # What is read at once is of one step, which computes one token without guesses.
                guessed += max(0, len(output.generated_ids) - 1)
                tokens += output.generated_ids
                logprobs += output.generated_log_probs
                end = self._words.reasons.get(output.finish_reason, end)
        if status == self._words.ignored:
            end = End.NO_ROOM
        elif status == self._words.finished and end is None:
            end = End.STOP if tokens and tokens[-1] in self._eos else End.LENGTH
        return SequenceUpdate(self._number, tuple(tokens), tuple(logprobs), end, guessed=guessed)

    def cancel(self) -> None:
        """Ends the sequence; its pages are free after the next step."""
        self.cancelled = True
        self._handle.cancel()


class Pipeline:
    """The pipeline over a folder with ``openvino_model.xml`` and ``.bin``.

    Attributes:
        settings: How it was built.

    Raises:
        ModelLoadError: openvino-genai is not installed, or refuses the model or a property.
    """

    def __init__(self, folder: Path, settings: PipelineSettings) -> None:
        self.settings = settings
        self._genai = genai = _genai()
        self._words = _Words(genai)
        # A sequence that is added again gets a new number in GenAI.
        self._requests = itertools.count()
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = settings.pages
        scheduler.max_num_batched_tokens = settings.step_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = settings.prefix_caching
        # GenAI's own threads for sampling; by default one for each core of the machine.
        threads = int(settings.properties.get("INFERENCE_NUM_THREADS", 1))
        properties = {**settings.properties, "sampler_num_threads": threads}
        if settings.guesses:
            properties["prompt_lookup"] = True
        try:
            self._pipe = genai.ContinuousBatchingPipeline(os.fspath(folder), scheduler, settings.device, properties)
        except RuntimeError as error:
            raise ModelLoadError(f"OpenVINO GenAI cannot load the exported model: {error}") from error

    def add(self, number: int, prompt: Sequence[int], sampling: Sampling, *, seed: int, eos: frozenset[int]) -> Running:
        """Adds a sequence, which takes part in the steps from now on.

        Args:
            number: Of its news.
            prompt: Token ids, at least one.
            sampling: Of which ``n`` is not read.
            seed: In 0..2^32-1, for sampling.
            eos: Tokens that end the sequence.

        Raises:
            RuntimeError: GenAI refuses the parameters.
        """
        config = self._genai.GenerationConfig()
        config.max_new_tokens = sampling.max_tokens
        config.ignore_eos = sampling.ignore_eos
        # GenAI demands one; a model without any gets a token that no model has.
        config.eos_token_id = min(eos, default=_NO_TOKEN)
        config.stop_token_ids = {config.eos_token_id, *eos}
        config.repetition_penalty = sampling.repetition_penalty
        config.logprobs = 0 if sampling.logprobs is None else 1
        if self.settings.guesses:
            config.num_assistant_tokens = self.settings.guesses
            config.max_ngram_size = _LONGEST_MATCH
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.rng_seed = seed
            if sampling.top_k:
                config.top_k = sampling.top_k
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return Running(self._words, number, self._pipe.add_request(next(self._requests), ids, config), eos)

    def step(self) -> None:
        """Computes the next tokens of all sequences, or a part of a long prompt.

        Raises:
            RuntimeError: Something failed; sequences may still be there.
        """
        self._pipe.step()

    def holds_sequences(self) -> bool:
        """Whether some sequence has not ended, or was cancelled without a step since."""
        return self._pipe.has_non_finished_requests()

    def cache_usage(self) -> float:
        """Returns the share of pages in use at the last step."""
        return float(self._pipe.get_metrics().cache_usage) / 100


def _genai() -> Any:
    try:
        # Imported here: only workers that generate text need it.
        import openvino_genai
    except ImportError as error:
        raise ModelLoadError(
            f"generate.engine: genai needs openvino-genai ({error}): pip install 'torchserve-openvino[generate]'."
        ) from error
    return openvino_genai
