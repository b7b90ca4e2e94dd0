"""The engine on OpenVINO GenAI: many prompts at once, their ends and limits; against transformers' generate."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import OFF, answers, by_choice, finishes, opened, until

from language_models import EOS, VOCABULARY, each_kind, greedy, prompts, saved
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import GenerationError, InvalidInputError
from torchserve_openvino.generation.text.engine import Piece, Sampling
from torchserve_openvino.generation.text.genai.genai_engine import GenAIEngine
from torchserve_openvino.generation.text.genai.pipeline import PAGE

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")


@each_kind
def test_greedy_tokens_of_each_architecture(kind: str, served: Any) -> None:
    _, model, found = served(kind)
    given = prompts(3, 40, 17, 1)
    got = answers(found.engine, given, Sampling(24, ignore_eos=True))
    assert [each[0] for each in got] == [greedy(model, prompt, 24) for prompt in given]
    assert found.facts["tokens_compared"] == 4 * 24 and found.facts["first_difference"] is None
    assert found.facts["operators"] == found.facts["operators_on_openvino"] > 0


def test_long_prompts_take_several_steps_beside_short_ones(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    given = prompts(400, 5, 300, 1, 64, 33, 32, 31)
    got = answers(engine, given, Sampling(32, ignore_eos=True))
    assert [each[0] for each in got] == [greedy(llama[1], prompt, 32) for prompt in given]


@pytest.mark.parametrize("step_tokens", [1, 3])
def test_steps_of_few_tokens(llama: tuple[Path, Any], exports: Store, step_tokens: int) -> None:
    found = opened(llama[0], exports, verify=OFF, step_tokens=step_tokens).engine
    given = prompts(3, 40, 1, 2, 9)
    got = answers(found, given, Sampling(6, ignore_eos=True))
    found.close()
    assert [each[0] for each in got] == [greedy(llama[1], prompt, 6) for prompt in given]


def test_ends(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    (prompt,) = prompts(6)
    expected = greedy(llama[1], prompt, 60)
    pieces = list(engine.submit(prompt, Sampling(5, ignore_eos=True)))
    assert finishes(pieces) == {0: "length"} and by_choice(pieces)[0] == expected[:5]
    # A prompt on which some answer ends early; the ending token is given.
    for trial in prompts(*range(2, 30)):
        wanted = greedy(llama[1], trial, 40)
        if EOS in wanted:
            pieces = list(engine.submit(trial, Sampling(40)))
            assert finishes(pieces) == {0: "stop"}
            assert by_choice(pieces)[0] == wanted[: wanted.index(EOS) + 1]
            break
    else:
        pytest.fail("no prompt ends early")


@pytest.mark.slow
def test_a_model_without_an_end(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt2", eos_token_id=None)
    (tmp_path / "generation_config.json").write_text("{}")
    found = opened(tmp_path, verify=OFF)
    (prompt,) = prompts(4)
    pieces = list(found.engine.submit(prompt, Sampling(70)))
    found.engine.close()
    assert finishes(pieces) == {0: "length"} and by_choice(pieces)[0] == greedy(model, prompt, 70)


@pytest.mark.usefixtures("unhurried")
def test_pieces_come_one_token_after_the_other(own: GenAIEngine) -> None:
    """Where a step takes longer than `stepping._READ_SECONDS`; of faster ones several come together."""
    stream = own.submit(prompts(5)[0], Sampling(6, ignore_eos=True))
    pieces: list[Piece] = []
    with pytest.raises(StopIteration):
        while True:
            piece = stream.next(10.0)
            assert piece is not None
            pieces.append(piece)
    assert [len(piece.tokens) for piece in pieces] == [1] * 6
    with pytest.raises(StopIteration):
        stream.next(0.0)


@pytest.mark.usefixtures("unhurried")
def test_waiting_for_a_piece_has_a_limit(own: GenAIEngine) -> None:
    stream = own.submit(prompts(400)[0], Sampling(100, ignore_eos=True))
    assert stream.next(0.0) is None
    stream.cancel()
    list(stream)


def test_log_probabilities_are_those_of_the_raw_logits(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    (prompt,) = prompts(7)
    for sampling in (
        Sampling(8, logprobs=1, ignore_eos=True),
        Sampling(8, temperature=1.3, top_k=5, seed=1, logprobs=0, ignore_eos=True),
        Sampling(8, temperature=0.7, top_p=0.8, seed=2, logprobs=0, repetition_penalty=1.5, ignore_eos=True),
    ):
        tokens = [token for piece in engine.submit(prompt, sampling) for token in piece.tokens]
        ids = torch.tensor([prompt + [token.id for token in tokens]])
        with torch.no_grad():
            found = llama[1](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = [float(row[token.id]) for row, token in zip(found, tokens, strict=True)]
        assert [token.logprob for token in tokens] == pytest.approx(wanted, abs=1e-4)
        if sampling.logprobs:
            assert all(token.top == ((token.id, token.logprob),) for token in tokens)
        else:
            assert all(token.top == () for token in tokens)


def test_equal_seeds_give_equal_tokens_whatever_else_runs(engine: GenAIEngine) -> None:
    (prompt,) = prompts(9)
    sampling = Sampling(20, temperature=1.0, seed=7, ignore_eos=True)
    alone = answers(engine, [prompt], sampling)[0]
    others = [engine.submit(other, Sampling(30, temperature=1.0, ignore_eos=True)) for other in prompts(4, 50, 12)]
    beside = answers(engine, [prompt], sampling)[0]
    assert alone == beside
    assert alone != answers(engine, [prompt], Sampling(20, temperature=1.0, seed=8, ignore_eos=True))[0]
    free = [answers(engine, [prompt], Sampling(20, temperature=1.0, ignore_eos=True))[0] for _ in range(3)]
    assert len({tuple(each[0]) for each in free}) > 1
    for stream in others:
        list(stream)


def test_sampling_has_the_right_distribution(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    (prompt,) = prompts(4)
    count, temperature, top_k = 600, 0.8, 4
    found = [
        engine.submit(prompt, Sampling(1, temperature=temperature, top_k=top_k, seed=seed, n=50, ignore_eos=True))
        for seed in range(0, count, 50)
    ]
    drawn = [each[0] for stream in found for each in by_choice(list(stream), 50)]
    with torch.no_grad():
        best = (llama[1](torch.tensor([prompt])).logits[0, -1] / temperature).topk(top_k)
    assert set(drawn) <= set(best.indices.tolist()) and len(drawn) == count
    shares = torch.tensor([drawn.count(token) / count for token in best.indices.tolist()])
    # Four standard deviations.
    wanted = best.values.softmax(-1)
    assert ((shares - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_repetition_penalty_is_that_of_transformers(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    from transformers import GenerationConfig

    (prompt,) = prompts(10)
    config = GenerationConfig(max_new_tokens=30, do_sample=False, repetition_penalty=1.8, pad_token_id=0)
    wanted = llama[1].generate(torch.tensor([prompt]), generation_config=config, eos_token_id=None)[0, 10:].tolist()
    assert wanted != greedy(llama[1], prompt, 30)
    assert answers(engine, [prompt], Sampling(30, repetition_penalty=1.8, ignore_eos=True)) == [[wanted]]


def test_several_sequences(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    (prompt,) = prompts(8)
    pieces = list(engine.submit(prompt, Sampling(12, temperature=1.2, seed=3, n=3, ignore_eos=True)))
    assert finishes(pieces) == {0: "length", 1: "length", 2: "length"}
    found = by_choice(pieces, 3)
    assert len({tuple(each) for each in found}) == 3
    (second,) = answers(engine, [prompt], Sampling(12, temperature=1.2, seed=4, ignore_eos=True))
    assert found[1] == second[0], "the second sequence has the next seed"
    pieces = list(engine.submit(prompt, Sampling(6, n=2, ignore_eos=True)))
    assert by_choice(pieces, 2) == [greedy(llama[1], prompt, 6)] * 2 and finishes(pieces) == {0: "length", 1: "length"}


BAD: list[tuple[list[int], Sampling, str]] = [
    ([], Sampling(1), "no tokens"),
    ([1, VOCABULARY], Sampling(1), f"token 1 of the prompt is {VOCABULARY}; tokens are 0 to {VOCABULARY - 1}"),
    ([-1], Sampling(1), "token 0 of the prompt is -1"),
    ([5] * 500, Sampling(13), "500 tokens, and max_tokens is 13: 513 together, more than 512"),
    ([5] * 40, Sampling(470, temperature=1.0, n=9), "n=9 sequences .* 4608 tokens in the cache, which has 4096"),
    ([5], Sampling(0), "max_tokens must be at least 1; it is 0"),
    ([5], Sampling(1, n=0), "n must be at least 1"),
    ([5], Sampling(1, temperature=-1.0), "temperature must be 0 .*it is -1.0"),
    ([5], Sampling(1, temperature=float("nan")), "temperature"),
    ([5], Sampling(1, top_p=0.0), "top_p"),
    ([5], Sampling(1, top_p=1.1), "top_p"),
    ([5], Sampling(1, top_k=-1), "top_k"),
    ([5], Sampling(1, repetition_penalty=0.0), "repetition_penalty"),
    ([5], Sampling(1, logprobs=2), "logprobs can be at most 1"),
    ([5], Sampling(1, logprobs=1, temperature=1.0), "logprobs can be at most 0"),
]


@pytest.mark.parametrize(("prompt", "sampling", "message"), BAD, ids=[case[2][:20] for case in BAD])
def test_bad_input_is_refused_and_hurts_nobody(
    engine: GenAIEngine, llama: tuple[Path, Any], prompt: list[int], sampling: Sampling, message: str
) -> None:
    (good,) = prompts(5)
    stream = engine.submit(good, Sampling(10, ignore_eos=True))
    with pytest.raises(InvalidInputError, match=message):
        engine.submit(prompt, sampling)
    assert by_choice(list(stream))[0] == greedy(llama[1], good, 10)


@pytest.mark.usefixtures("unhurried")
def test_cancelling_frees_the_cache(own: GenAIEngine) -> None:
    stream = own.submit(prompts(10)[0], Sampling(400, ignore_eos=True))
    assert stream.next(10.0) is not None
    assert own.load().running == 1 and own.load().cache_usage > 0
    stream.cancel()
    stream.cancel()
    pieces = list(stream)
    assert finishes(pieces) == {0: "cancelled"} and sum(len(piece.tokens) for piece in pieces) < 399
    until(lambda: own.load().running == 0)
    assert own.load().cache_usage == 0.0


@pytest.mark.usefixtures("unhurried")
def test_some_of_several_sequences_may_have_ended_when_cancelled(own: GenAIEngine) -> None:
    stream = own.submit(prompts(3)[0], Sampling(200, temperature=1.0, n=4, seed=0))
    stream.next(10.0)
    stream.cancel()
    assert set(finishes(list(stream))) <= {0, 1, 2, 3}
    until(lambda: own.load().running == 0)


def test_an_idle_engine_computes_nothing(engine: GenAIEngine) -> None:
    until(lambda: engine.load().running == 0)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_counts(llama: tuple[Path, Any], exports: Store) -> None:
    found = opened(llama[0], exports, verify=OFF).engine
    answers(found, prompts(5, 7), Sampling(4, ignore_eos=True))
    load = found.load()
    assert (load.prompt_tokens, load.generated_tokens, load.waiting) == (12, 8, 0)
    assert load.prefix_hits == 0 and found.max_length == 512
    found.close()
    found.close()
    with pytest.raises(GenerationError, match="closed"):
        found.submit([5], Sampling(1))


def test_many_threads(llama: tuple[Path, Any], engine: GenAIEngine) -> None:
    given = prompts(*range(1, 25))
    wanted = [greedy(llama[1], prompt, 12) for prompt in given]
    got: dict[int, list[int]] = {}

    def work(number: int) -> None:
        stream = engine.submit(given[number], Sampling(12, ignore_eos=True))
        if number % 5 == 4:
            stream.cancel()
        got[number] = by_choice(list(stream))[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, tokens in enumerate(wanted):
        assert got[number] == (tokens if number % 5 != 4 else tokens[: len(got[number])])
    until(lambda: engine.load().running == 0)
    assert engine._free_pages == 512 * 8 // PAGE
