"""Prompts that begin alike, at the same time: pages of the cache that are not full are not written by two of them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engines import OFF, Heard, answers, opened

from language_models import VOCABULARY, each_kind, greedy, prompts
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.genai.engine_messages import Add, Cancel, End
from torchserve_openvino.generation.text.genai.long_prompts import SharedPrefixes, hashes_of
from torchserve_openvino.generation.text.genai.stepping import Stepper

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")

TOKENS = Sampling(4, ignore_eos=True)


@each_kind
@pytest.mark.parametrize(
    "section",
    [
        {},
        # Prompts of several steps; pages that are used again.
        pytest.param({"step_tokens": 64}, marks=pytest.mark.slow),
        pytest.param({"step_tokens": 48, "cache_gb": 0.0008, "max_length": 250}, marks=pytest.mark.slow),
    ],
)
def test_conversations_that_branch(kind: str, section: dict[str, Any], served: Any, exports: Store) -> None:
    """Each prompt goes on from an earlier one, with or without its answer; many at once."""
    given = {"max_length": 250, **section}
    sharing = opened(served(kind).folder, exports, verify=OFF, **given).engine
    apart = opened(served(kind).folder, exports, verify=OFF, **given, prefix_caching=False).engine
    generator = random.Random(kind)
    said = [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 60))] for _ in range(3)]
    for _ in range(20):
        asked = [_turn(generator, said) for _ in range(generator.randrange(1, 10))]
        asked += generator.choices(asked, k=generator.randrange(3))
        sampling = Sampling(generator.choice([1, 1, 2, 9, 30]), logprobs=0, ignore_eos=True)
        got, wanted = answers(sharing, asked, sampling), answers(apart, asked, sampling)
        assert got == wanted
        for prompt, (answer,) in zip(asked, got, strict=True):
            said.append(prompt + answer[: generator.randrange(len(answer) + 1)])
    assert sharing.load().prefix_hits and apart.load().prefix_hits == 0
    sharing.close()
    apart.close()


def _turn(generator: random.Random, said: list[list[int]]) -> list[int]:
    before = generator.choice(said[-12:])[: 200 if generator.random() < 0.7 else generator.randrange(1, 200)]
    return before + [generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(0, 20))]


def started(stepper: Stepper, *given: list[int]) -> Heard:
    heard = Heard(stepper)
    for number, prompt in enumerate(given):
        stepper.take(Add(number, tuple(prompt), TOKENS, 0))
    return heard


def test_only_those_that_begin_alike_take_turns(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    begin, first, second, other, last = prompts(20, 4, 7, 9, 8)
    stepper = stepper_of()
    started(stepper, begin).rest()
    given = [begin + first, begin + second, other, begin[:10] + last, other + last]
    heard = started(stepper, *given).rest()
    # The last begins with a prompt that came with it; the one before with a part of one only.
    assert heard.first == {0: 1, 1: 2, 2: 1, 3: 1, 4: 2}
    model = served("llama").model
    assert heard.tokens == {number: greedy(model, prompt, 4) for number, prompt in enumerate(given)}


def test_equal_ones_go_together_as_far_as_one_step_computes_them(
    served: Any, stepper_of: Callable[..., Stepper]
) -> None:
    (begin,) = prompts(25)
    stepper = stepper_of()
    started(stepper, begin[:20]).rest()
    # 64 tokens at once.
    heard = started(stepper, begin, begin, begin).rest()
    assert heard.first == {0: 1, 1: 1, 2: 2}
    assert heard.tokens == dict.fromkeys(range(3), greedy(served("llama").model, begin, 4))


def test_without_the_cache_of_prefixes_nobody_waits(stepper_of: Callable[..., Stepper]) -> None:
    (begin,) = prompts(20)
    assert started(stepper_of(prefix_caching=False), begin, begin, begin).rest().first == {0: 1, 1: 1, 2: 1}


def test_one_that_waits_may_be_cancelled(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    (begin,) = prompts(20)
    heard = started(stepper_of(), begin, [*begin, 5], [*begin, 6])
    heard.step()
    heard.stepper.take(Cancel(1))
    heard.rest()
    assert heard.ends == {0: End.LENGTH, 1: End.CANCELLED, 2: End.LENGTH}
    assert heard.tokens[2] == greedy(served("llama").model, [*begin, 6], 4)


def test_a_failed_step_ends_those_that_wait(
    stepper_of: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch
) -> None:
    (begin,) = prompts(20)
    heard = started(stepper_of(), begin, [*begin, 5])

    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(heard.stepper._pipeline, "step", fail)
    heard.step()
    assert heard.ends == {0: End.FAILED, 1: End.FAILED} and not heard.stepper.busy


def test_a_long_prompt_waits_too(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    long, tail = prompts(200, 5)
    heard = started(stepper_of(), long, long[:40] + tail, long[:40], long + tail)
    heard.rest()
    model = served("llama").model
    given = [long, long[:40] + tail, long[:40], long + tail]
    assert heard.tokens == {number: greedy(model, prompt, 4) for number, prompt in enumerate(given)}


class TestBeginnings:
    def test_a_prompt_is_its_own_beginning(self) -> None:
        found = SharedPrefixes(8)
        assert found.may_begin(hashes_of([1, 2]))
        found.begin(0, hashes_of([1, 2]))
        assert not found.may_begin(hashes_of([1, 2])) and not found.may_begin(hashes_of([1, 2, 3]))
        assert found.may_begin(hashes_of([1])) and found.may_begin(hashes_of([2, 1, 2]))
        assert found.may_begin(hashes_of([1, 2]), fits=True)
        assert not found.may_begin(hashes_of([1, 2, 3]), fits=True)
        found.end(0)
        assert found.may_begin(hashes_of([1, 2]))

    def test_equal_ones_wait_for_another(self) -> None:
        found = SharedPrefixes(8)
        found.begin(0, hashes_of([1]))
        found.begin(1, hashes_of([1, 2]))
        assert not found.may_begin(hashes_of([1, 2]), fits=True)
        found.end(0)
        assert found.may_begin(hashes_of([1, 2]), fits=True)

    def test_what_was_known_before_counts(self) -> None:
        found = SharedPrefixes(8)
        for number, prompt in enumerate(([1], [2])):
            found.begin(number, hashes_of(prompt))
            found.end(number)
        found.begin(2, hashes_of([1, 5]))
        assert not found.may_begin(hashes_of([1, 6])) and found.may_begin(hashes_of([2, 6]))
        # Two with the same earlier prompt, once both were let in.
        found.begin(3, hashes_of([1, 6]))
        found.end(2)
        assert not found.may_begin(hashes_of([1, 7]))
        found.end(3)
        found.end(3)
        assert found.may_begin(hashes_of([1, 7]))

    def test_the_oldest_are_forgotten(self) -> None:
        found = SharedPrefixes(1)
        for number in range(40):
            found.begin(number, hashes_of([number]))
            found.end(number)
        found.begin(100, hashes_of([0, 5]))
        assert found.may_begin(hashes_of([0, 6])), "0 was forgotten"
        found.begin(101, hashes_of([39, 5]))
        assert not found.may_begin(hashes_of([39, 6]))
        found.clear()
        assert found.may_begin(hashes_of([39, 6]))
