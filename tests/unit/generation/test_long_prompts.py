"""Long prompts in parts, and prompts that are cancelled while they are computed; the pipeline is GenAI's own."""

from collections.abc import Callable
from typing import Any

import pytest
from engines import Heard

from language_models import greedy, prompts
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.genai.engine_messages import Add, Cancel, End
from torchserve_openvino.generation.text.genai.pipeline import Pipeline
from torchserve_openvino.generation.text.genai.stepping import Stepper

TOKENS = Sampling(4, ignore_eos=True)


def test_a_short_prompt_goes_between_the_parts_of_a_long_one(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    long, short = prompts(400, 9)
    alone = Heard(stepper_of())
    alone.stepper.take(Add(0, tuple(long), TOKENS, 0))
    whole = alone.rest().first[0]
    # Parts of a page.
    assert whole == 13

    heard = Heard(stepper_of())
    heard.stepper.take(Add(0, tuple(long), TOKENS, 0))
    for _ in range(3):
        heard.step()
    heard.stepper.take(Add(1, tuple(short), TOKENS, 0))
    heard.step()
    assert heard.first == {1: 4}
    heard.rest()
    assert heard.first[0] == whole + 1
    model = served("llama").model
    assert heard.tokens == {0: greedy(model, long, 4), 1: greedy(model, short, 4)}
    assert set(heard.ends.values()) == {End.LENGTH}


@pytest.mark.slow
def test_short_prompts_without_end_do_not_starve_long_ones(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    long, second, *short = prompts(300, 200, *[5] * 40)
    heard = Heard(stepper_of())
    for number, each in enumerate([long, second, *short]):
        heard.stepper.take(Add(number, tuple(each), TOKENS, 0))
        heard.step()
    heard.rest()
    assert heard.first[0] <= 2 * 10 and heard.first[0] < heard.first[1] <= 2 * 17
    model = served("llama").model
    assert heard.tokens == {n: greedy(model, each, 4) for n, each in enumerate([long, second, *short])}


def test_what_was_computed_before_needs_no_parts(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    (first,) = prompts(390)
    heard = Heard(stepper_of())
    heard.stepper.take(Add(0, tuple(first), Sampling(60, ignore_eos=True), 0))
    heard.rest()
    # The next turn of a conversation: prompt, answer, and something more.
    turn = first + heard.tokens[0] + prompts(20)[0]
    before = heard.steps
    heard.stepper.take(Add(1, tuple(turn), TOKENS, 0))
    heard.rest()
    assert heard.first[1] == before + 1
    assert heard.tokens[1] == greedy(served("llama").model, turn, 4)
    # Of 450 tokens the last was given, not computed; a page has 32.
    assert heard.stepper.read().hits == 448


def test_what_is_read_after_several_steps_is_the_same(served: Any, stepper_of: Callable[..., Stepper]) -> None:
    stepper, steps = stepper_of(), 0
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for (number, prompt), count in zip(enumerate(prompts(5, 40, 90)), (30, 2, 17), strict=True):
        stepper.take(Add(number, tuple(prompt), Sampling(count, ignore_eos=True), 0))
    ends = {}
    while stepper.busy:
        stepper.step()
        steps += 1
        if stepper.is_due or steps % 5 == 0:
            for news in stepper.read().news:
                tokens[news.number] += news.tokens
                ends |= {news.number: news.end} if news.end else {}
    model = served("llama").model
    wanted = {n: greedy(model, p, c) for (n, p), c in zip(enumerate(prompts(5, 40, 90)), (30, 2, 17), strict=True)}
    assert tokens == wanted and ends == dict.fromkeys(range(3), End.LENGTH)
    # The last end is known at once.
    assert steps <= 32


def test_without_the_cache_of_prefixes_the_order_is_that_of_arrival(stepper_of: Callable[..., Stepper]) -> None:
    long, short = prompts(400, 9)
    heard = Heard(stepper_of(prefix_caching=False))
    heard.stepper.take(Add(0, tuple(long), TOKENS, 0))
    heard.step()
    heard.stepper.take(Add(1, tuple(short), TOKENS, 0))
    heard.rest()
    assert heard.first == {0: 7, 1: 7}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [60, 130, 400])
def test_a_prompt_is_right_after_it_was_cancelled(
    length: int, steps: int, served: Any, stepper_of: Callable[..., Stepper]
) -> None:
    """GenAI finds a page again that is half computed, as if it were whole: no page may be left so."""
    *others, long = prompts(5, 6, 7, length)
    heard = Heard(stepper_of())
    for number, each in enumerate(others):
        heard.stepper.take(Add(number, tuple(each), Sampling(30, ignore_eos=True), 0))
    heard.step()
    heard.stepper.take(Add(8, tuple(long), Sampling(30, ignore_eos=True), 0))
    for _ in range(steps):
        heard.step()
    heard.stepper.take(Cancel(8))
    while 8 not in heard.ends:
        heard.step()
    assert heard.ends[8] is End.CANCELLED
    model = served("llama").model
    for number, tail in enumerate([[], [7, 8, 9]], 9):
        heard.stepper.take(Add(number, (*long, *tail), TOKENS, 0))
        heard.rest()
        assert heard.tokens[number] == greedy(model, [*long, *tail], 4)
    assert [heard.tokens[number] for number in range(3)] == [greedy(model, each, 30) for each in others]


def test_a_failed_step_ends_a_pipeline_whose_pages_may_be_half_computed(
    stepper_of: Callable[..., Stepper], monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = prompts(400, 9)
    stepper = stepper_of()
    for number, each in enumerate((long, short)):
        stepper.take(Add(number, tuple(each), TOKENS, 0))
    whole, fails = Pipeline.step, [True]

    def step(pipeline: Pipeline) -> None:
        if fails:
            fails.clear()
            raise RuntimeError("the memory is gone")
        whole(pipeline)

    monkeypatch.setattr(Pipeline, "step", step)
    stepper.step()
    assert stepper.is_due
    update = stepper.read()
    assert "the memory is gone" in update.dead and "pages" in update.dead
    assert {news.number: news.end for news in update.news} == {0: End.FAILED, 1: End.FAILED}
