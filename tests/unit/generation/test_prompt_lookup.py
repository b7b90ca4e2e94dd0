"""`generate.prompt_lookup_tokens`: tokens that are guessed, and checked by the model, are those without guesses."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import OFF, answers, finishes, opened, until

from language_models import EOS, VOCABULARY, each_kind, greedy, prompts
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import ConfigError, InvalidInputError
from torchserve_openvino.generation.text.engine import Engine, Sampling
from torchserve_openvino.generation.text.genai.genai_engine import GenAIEngine

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")

REPEATING = [5, 6, 7, 8] * 6


@pytest.fixture
def guessing(served: Any, exports: Store) -> Iterator[Callable[..., GenAIEngine]]:
    """Opens an engine that guesses, over a tiny model."""
    engines: list[GenAIEngine] = []

    def make(kind: str = "llama", guesses: int = 4, **section: Any) -> GenAIEngine:
        given = {"verify": OFF, **section}
        engines.append(opened(served(kind).folder, exports, prompt_lookup_tokens=guesses, **given).engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@each_kind
def test_greedy_tokens_of_each_architecture(kind: str, served: Any, guessing: Callable[..., GenAIEngine]) -> None:
    engine, given = guessing(kind), [*prompts(3, 40, 17, 1), REPEATING]
    got = answers(engine, given, Sampling(60, ignore_eos=True))
    assert [each[0] for each in got] == [greedy(served(kind).model, prompt, 60) for prompt in given]
    load = engine.load()
    assert load.generated_tokens == 5 * 60 and 0 < load.guessed_tokens < load.generated_tokens
    assert load.cache_usage == 0.0 and load.prefix_hits == 0


def _random_case(generator: random.Random) -> tuple[list[int], Sampling]:
    few = generator.choice([[5, 6], [7, 8, 9, 10], range(3, VOCABULARY)])
    how: dict[str, Any] = generator.choice([
        {}, {"repetition_penalty": 1.3}, {"temperature": 0.7, "seed": generator.randint(0, 99)},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2},
    ])  # fmt: skip
    prompt = [generator.choice(few) for _ in range(generator.randint(1, 200))]
    count, on = generator.randint(1, 120), generator.random() < 0.5
    return prompt, Sampling(count, ignore_eos=on, logprobs=0, **how)


@pytest.mark.parametrize(
    ("guesses", "section"),
    [
        (4, {}),
        # Two sequences at once; one at once.
        (5, {"step_tokens": 16}),
        pytest.param(15, {"step_tokens": 16}, marks=pytest.mark.slow),
        # Room for two or three sequences.
        pytest.param(32, {"step_tokens": 64, "cache_gb": 0.0003, "max_length": 420}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
    ],
)
def test_whatever_is_asked_gets_the_tokens_that_it_gets_without_guesses(
    engine: GenAIEngine, guessing: Callable[..., GenAIEngine], guesses: int, section: dict[str, Any]
) -> None:
    other, generator = guessing(guesses=guesses, **section), random.Random(guesses)
    for count in (1, 12, 5):
        cases = [_random_case(generator) for _ in range(count)]
        plain, guessed = (_all_of(one, cases) for one in (engine, other))
        assert [tokens for tokens, _, _ in guessed] == [tokens for tokens, _, _ in plain]
        for (_, found, end), (_, wanted, ended) in zip(guessed, plain, strict=True):
            assert found == pytest.approx(wanted, abs=1e-3) and end == ended
    load = other.load()
    assert load.guessed_tokens > 0 and (load.running, load.waiting) == (0, 0)


def _all_of(
    engine: Engine, cases: list[tuple[list[int], Sampling]]
) -> list[tuple[list[int], list[float | None], dict[int, str]]]:
    """Tokens, log probabilities and ends of prompts that run at once."""
    streams = [engine.submit(prompt, sampling) for prompt, sampling in cases]
    found = []
    for stream in streams:
        pieces = list(stream)
        tokens = [token for piece in pieces for token in piece.tokens]
        found.append(([token.id for token in tokens], [token.logprob for token in tokens], finishes(pieces)))
    return found


def test_an_answer_up_to_the_longest_length(served: Any, guessing: Callable[..., GenAIEngine]) -> None:
    """Guesses reach beyond the positions that the model has."""
    for kind in ("llama", "gpt2"):
        engine, prompt = guessing(kind, 7), prompts(448)[0]
        # 64 tokens, up to 512.
        assert answers(engine, [prompt], Sampling(64, ignore_eos=True)) == [[greedy(served(kind).model, prompt, 64)]]


def test_nothing_follows_an_end_that_was_guessed(served: Any, guessing: Callable[..., GenAIEngine]) -> None:
    model, engine, ends = served("llama").model, guessing(), 0
    for trial in prompts(*range(2, 40)):
        wanted = greedy(model, trial, 40)
        if EOS not in wanted:
            continue
        # The answer stands in the prompt, with something behind it.
        prompt = [*trial, *wanted, *trial]
        expected = greedy(model, prompt, 40)
        (got,) = answers(engine, [prompt], Sampling(40))
        assert got[0] == expected[: expected.index(EOS) + 1 if EOS in expected else None]
        ends += EOS in expected
        if ends == 2:
            return
    pytest.fail("no answer ended: this test needs other weights")


@pytest.mark.usefixtures("unhurried", "nearby")
def test_cancelling_frees_pages_and_places(served: Any, guessing: Callable[..., GenAIEngine]) -> None:
    # One sequence at once.
    engine = guessing(guesses=8, step_tokens=16)
    first, second, third = (engine.submit(REPEATING, Sampling(400, ignore_eos=True)) for _ in range(3))
    assert first.next(10.0) is not None
    assert engine.load().running == 1 and engine.load().waiting == 2
    second.cancel()
    first.cancel()
    assert finishes(list(first)) == {0: "cancelled"} == finishes(list(second))
    assert third.next(10.0) is not None
    third.cancel()
    list(third)
    until(lambda: engine.load().running == 0)
    assert answers(engine, [REPEATING], Sampling(20, ignore_eos=True)) == [
        [greedy(served("llama").model, REPEATING, 20)]
    ]


def test_several_sequences(served: Any, engine: GenAIEngine, guessing: Callable[..., GenAIEngine]) -> None:
    sampling = Sampling(30, temperature=1.2, seed=3, n=3, ignore_eos=True)
    other = guessing(guesses=4, step_tokens=16)
    assert answers(other, [REPEATING], sampling) == answers(engine, [REPEATING], sampling)
    with pytest.raises(InvalidInputError, match=r"n=4 sequences .* of 3 \(generate.step_tokens"):
        other.submit(REPEATING, Sampling(30, temperature=1.2, n=4))
    greedily = answers(other, [REPEATING], Sampling(6, n=4, ignore_eos=True))
    assert greedily == [[greedy(served("llama").model, REPEATING, 6)] * 4]


def test_the_report_says_so(served: Any, exports: Store) -> None:
    found = opened(served("llama").folder, exports, prompt_lookup_tokens=4)
    found.engine.close()
    assert found.facts["prompt_lookup_tokens"] == 4 and found.facts["prefix_caching"] is False
    assert found.facts["passed"] and found.facts["first_difference"] is None
    assert served("llama").opened.facts["prompt_lookup_tokens"] == 0


def test_a_cache_without_room_for_guesses_is_refused(served: Any, exports: Store) -> None:
    # A page of 32 tokens: two layers, two heads of 8 features, key and value, 4 bytes.
    with pytest.raises(ConfigError, match=r"cache_gb.*less than a page .* beside 32 guesses"):
        opened(served("llama").folder, exports, cache_gb=32 * 256 / 1e9, prompt_lookup_tokens=32)


def test_the_engine_compile_refuses_it(tmp_path: Path) -> None:
    from torchserve_openvino.config.sections.generate import GenerateSection
    from torchserve_openvino.generation.text.compiled_steps import check

    with pytest.raises(ConfigError, match="prompt_lookup_tokens: is 3, which the engine compile does not do"):
        check(GenerateSection(prompt_lookup_tokens=3), "CPU")
