"""Proves an engine before it serves: its greedy tokens are those of eager PyTorch, for several prompts at once.

In f32, what counts as equal: a token that differs is accepted only as a tie, where eager PyTorch finds it less probable
than its own by at most `TIE` (natural log probability). The comparison then goes on after eager PyTorch's token. And
the log probability of each token may differ by at most `DRIFT`.

Other formats generate other tokens by design. There the logits decide: the mean of their cosine similarities with eager
PyTorch's must reach `LEAST_COSINE`, or `verify.min_cosine`. In f32 the least of them must.

A proof that passed is stored. The next start on this machine, with the same versions, model and settings, compares the
first `AGAIN` tokens of each prompt.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import BusyError
from torchserve_openvino.generation.text.engine import Engine, Sampling, Stream
from torchserve_openvino.generation.text.expected import Expected, Nearness

TIE = 5e-4
DRIFT = 1e-3
AGAIN = 4
# By the least exact of weights, computation and cache; the last is for any other.
LEAST_COSINE = {"f32": 0.9999, "f16": 0.999, "bf16": 0.995, "u8": 0.995, "int8": 0.99, "int4": 0.9}
_LEAST_OF_OTHERS = 0.99


@dataclass(frozen=True)
class Difference:
    """A generated token that is not eager PyTorch's.

    Attributes:
        prompt: Which prompt, from 0.
        prompt_tokens: Its length.
        place: Which generated token, from 0.
        expected: Eager PyTorch's token.
        got: The engine's token.
        gap: How much less probable it is by eager PyTorch, in log probability; None if it is not among its first 8.
    """

    prompt: int
    prompt_tokens: int
    place: int
    expected: int
    got: int
    gap: float | None


@dataclass(frozen=True)
class GenerationProof:
    """What the proof found.

    Attributes:
        prompts: How many prompts ran at once.
        tokens_compared: Generated tokens that were compared with eager PyTorch's.
        tokens_equal: Those that were equal.
        ties: Those that differed where eager PyTorch finds both equally probable, up to `TIE`.
        first_difference: The first that differed otherwise; None if none did.
        max_logprob_difference: Largest difference of the log probability of an equal token.
        logits: How near the logits of the exported model come, over all tokens of the prompts.
        problems: Why the engine must not serve; empty if it may.
    """

    prompts: int
    tokens_compared: int
    tokens_equal: int
    ties: int
    first_difference: Difference | None
    max_logprob_difference: float
    logits: Nearness
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the engine may serve."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it, JSON-safe."""
        return {**asdict(self), "problems": list(self.problems), "passed": self.passed}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "GenerationProof":
        """Reads one back from what `to_dict` returned. Raises LookupError, TypeError or ValueError if it can't be."""
        first = plain["first_difference"]
        return cls(
            int(plain["prompts"]), int(plain["tokens_compared"]), int(plain["tokens_equal"]), int(plain["ties"]),
            None if first is None else Difference(**first), float(plain["max_logprob_difference"]),
            Nearness.of_plain(plain["logits"]), tuple(map(str, plain["problems"])),
        )  # fmt: skip

    def to_verify(self) -> dict[str, Any]:
        """Returns the report's entry ``verify``, JSON-safe."""
        return {
            "against": "eager", "passed": self.passed, "cases": self.prompts, "problems": list(self.problems),
            "tokens_compared": self.tokens_compared, "tokens_equal": self.tokens_equal,
            "cosine": self.logits.cosine, "max_abs": self.logits.max_abs,
        }  # fmt: skip


@dataclass
class Count:
    """What comparisons have found so far; see `GenerationProof`."""

    compared: int = 0
    equal: int = 0
    ties: int = 0
    missing: int = 0
    drift: float = 0.0
    first: Difference | None = None


def prove(
    engine: Engine,
    expected: Sequence[Expected],
    logits: Nearness,
    forms: Iterable[str],
    verify: VerifySection,
) -> GenerationProof:
    """Generates for all prompts at once, and compares with what eager PyTorch generated.

    Args:
        engine: Serves nobody yet.
        expected: What eager PyTorch generated.
        logits: How near the exported model's logits come.
        forms: Precisions of weights, computation and cache, such as ``f32``, ``int8``, ``u8``.
        verify: `handler.openvino.verify`: the tolerances.
    """
    form = least_exact(forms)
    count = Count()
    # The prompts that are compared, with how many of their tokens were.
    going = {number: 0 for number, one in enumerate(expected) if one.tokens}
    while going:
        answers = _generated(engine, [(expected[number], done) for number, done in going.items()])
        going = {
            number: after
            for (number, done), answer in zip(going.items(), answers, strict=True)
            if (after := compare(number, expected[number], done, answer, count, form == "f32")) is not None
        }
    problems = problems_of(form, count, logits, verify)
    return GenerationProof(
        len(expected), count.compared, count.equal, count.ties, count.first, count.drift, logits, tuple(problems)
    )


def least_exact(forms: Iterable[str]) -> str:
    """Returns which of several precisions decides how near the logits have to be."""
    return min(forms, key=lambda form: LEAST_COSINE.get(form, _LEAST_OF_OTHERS))


def _generated(engine: Engine, prompts: Sequence[tuple[Expected, int]]) -> list[list[tuple[int, float]]]:
    """Continues all prompts at once after some of the expected tokens; returns tokens with log probabilities."""
    answers: list[list[tuple[int, float]]] = []
    streams: deque[Stream] = deque()
    for one, done in prompts:
        prompt = (*one.prompt, *one.tokens[:done])
        sampling = Sampling(len(one.tokens) - done, logprobs=0, ignore_eos=True, bare=True)
        while True:
            try:
                streams.append(engine.submit(prompt, sampling))
                break
            except BusyError:
                if not streams:
                    raise
                answers.append(_all_of(streams.popleft()))
    return answers + [_all_of(stream) for stream in streams]


def _all_of(stream: Stream) -> list[tuple[int, float]]:
    return [(token.id, token.logprob or 0.0) for piece in stream for token in piece.tokens]


def compare(
    number: int, expected: Expected, done: int, answer: Sequence[tuple[int, float]], count: Count, exact: bool
) -> int | None:
    """Compares an answer with what eager PyTorch generated.

    Args:
        number: The prompt's number.
        expected: What eager PyTorch generated.
        done: How many of its tokens were compared before.
        answer: Tokens with their log probabilities, from that place on.
        count: Counts what is found.
        exact: Whether ties are told from other differences.

    Returns:
        From which token on to generate again, after a tie; None if the comparison is done.
    """
    for index, (token, logprob) in enumerate(answer, done):
        best = expected.tokens[index]
        count.compared += 1
        if token == best:
            count.equal += 1
            drift = abs(logprob - expected.rivals[index][0][1])
            if drift > count.drift or math.isnan(drift):
                count.drift = drift
            continue
        gap = expected.gap(index, token)
        if not exact or gap is None or gap > TIE:
            count.first = count.first or Difference(number, len(expected.prompt), index, best, token, gap)
            return None
        count.ties += 1
        return index + 1 if index + 1 < len(expected.tokens) else None
    count.missing += len(expected.tokens) - done - len(answer)
    return None


def problems_of(form: str, count: Count, logits: Nearness, verify: VerifySection) -> list[str]:
    """Returns why an engine must not serve; see `GenerationProof.problems`.

    Args:
        form: The least exact of its precisions.
        count: What was found in the tokens.
        logits: How near the logits come.
        verify: The tolerances.
    """
    problems = []
    if count.missing:
        problems.append(f"answers end early: {count.missing} tokens of eager PyTorch's are missing")
    least = verify.min_cosine if verify.min_cosine is not None else LEAST_COSINE.get(form, _LEAST_OF_OTHERS)
    # A cosine that is not a number is below any bound.
    cosine = logits.least_cosine if form == "f32" else logits.cosine
    if not cosine >= least:
        problems.append(f"the logits have a cosine similarity of {cosine:.6f} with eager PyTorch's, not {least:g}")
    if verify.max_abs is not None and not logits.max_abs <= verify.max_abs:
        problems.append(f"a logit differs by {logits.max_abs:.3g} from eager PyTorch's, more than {verify.max_abs:g}")
    if verify.min_top1 is not None and logits.top1 < verify.min_top1:
        problems.append(f"the best token is eager PyTorch's in {logits.top1:.1%} of places, not {verify.min_top1:.1%}")
    if form != "f32":
        return problems
    if (first := count.first) is not None:
        gap = "not among eager PyTorch's first 8" if first.gap is None else f"less probable by {first.gap:.3g}"
        problems.append(
            f"generated token {first.place} of a prompt with {first.prompt_tokens} tokens is {first.got}, not "
            f"{first.expected} ({gap}; a tie is up to {TIE:g})"
        )
    if not count.drift <= DRIFT:
        problems.append(f"a log probability differs by {count.drift:.3g} from eager PyTorch's, more than {DRIFT:g}")
    return problems
