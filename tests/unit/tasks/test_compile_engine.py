"""The engine `compile`: models that OpenVINO GenAI does not take, by graphs of their own; against transformers."""

import gc
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from language_models import EOS, VOCABULARY, prompts, seq2seq, tiny
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import BusyError, ConfigError, GenerationError, InvalidInputError, VerificationError
from torchserve_openvino.generation.compiled.hf_adapter import with_compiled_forward
from torchserve_openvino.generation.text.choosing import choose
from torchserve_openvino.generation.text.compiled_steps import places_of
from torchserve_openvino.generation.text.eager import EagerEngine, EagerSteps
from torchserve_openvino.generation.text.engine import Piece, Sampling, StepLimits
from torchserve_openvino.generation.text.rules import Rules
from torchserve_openvino.generation.text.stepping_engine import SteppingEngine
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.threads import plan_threads
from torchserve_openvino.serving.worker_context import WorkerContext
from torchserve_openvino.tasks.generation.compiling import Compiled, open_compiled

pytest.importorskip("transformers")
SMALL = {"max_length": 40, "max_tokens": 16, "step_tokens": 8, "proof_tokens": 5}


def opened(folder: Path, cache: Path | None = None, openvino: Any = None, **generate: Any) -> Compiled:
    options = {"model_caching": cache is not None, **({"cache_dir": str(cache)} if cache else {})}
    config = load_serving_config({
        "pt2": {"compile": {"enable": True, "backend": "openvino", "options": options}},
        "handler": {"openvino": {"generate": {**SMALL, **generate}, **(openvino or {})}},
    })  # fmt: skip
    threads = plan_threads(1, workers=1, streams=1, throughput=False, ov_config={}, device="CPU", cores=1)
    context = WorkerContext(config, folder, threads, 1, Counters())
    return open_compiled(folder, context, [], "the test says so")


def saved(folder: Path, kind: str) -> Any:
    model = seq2seq(kind) if kind in {"t5", "bart"} else tiny(kind)
    model.save_pretrained(folder)
    return model


class Served:
    def __init__(self, kind: str, place: Path) -> None:
        self.folder, self.cache = place / "model", place / "cache"
        self.model = saved(self.folder, kind)
        self.opened = opened(self.folder, self.cache)
        self.engine: Any = self.opened.engine
        self.face = with_compiled_forward(self.engine._steps.generation)
        self.builds = self.opened.tracker.builds


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Compiles a tiny model of a kind, once."""
    made: dict[str, Served] = {}

    def serve(kind: str) -> Served:
        if kind not in made:
            made[kind] = Served(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    yield serve
    for one in made.values():
        one.engine.close()


def tokens(pieces: list[Piece], choice: int = 0) -> list[int]:
    return [token.id for piece in pieces if piece.choice == choice for token in piece.tokens]


def written(model: Any, prompt: list[int], **how: Any) -> list[int]:
    """What transformers' own ``generate`` answers; with an encoder, without the token that it begins with."""
    found = model.generate(torch.tensor([prompt]), do_sample=False, **how)
    return found[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


each_kind = pytest.mark.parametrize(
    "kind", ["t5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "bart", "bloom", "mistral"))]
)


@pytest.mark.slow
@each_kind
def test_answers_are_transformers_own(kind: str, served: Callable[[str], Served]) -> None:
    one = served(kind)
    given = prompts(21, 3, 8, 1)
    streams = [one.engine.submit(prompt, Sampling(10)) for prompt in given]
    for prompt, stream in zip(given, streams, strict=True):
        pieces = list(stream)
        assert tokens(pieces) == written(one.model, prompt, max_new_tokens=10)
        assert all(len(piece.tokens) == 1 for piece in pieces), "token by token"
        assert pieces[-1].finish == ("stop" if tokens(pieces)[-1] == EOS else "length")
    facts, summary = one.opened.facts, one.opened.tracker.fallback_counts()
    assert facts["passed"] and facts["tokens_compared"] == facts["tokens_equal"] == 3 * 5
    assert facts["operators"] == facts["operators_on_openvino"] > 0 and not summary
    assert one.opened.tracker.verify.passed
    assert one.opened.tracker.builds == one.builds, "nothing is compiled after the start"


@pytest.mark.slow
@each_kind
def test_transformers_generate_by_the_same_graphs(kind: str, served: Callable[[str], Served]) -> None:
    one = served(kind)
    most = 17
    ids, mask = torch.zeros(3, most, dtype=torch.int64), torch.zeros(3, most, dtype=torch.int64)
    for row, prompt in enumerate(prompts(most, 3, 9)):
        # Padded on the left, as for all decoders.
        ids[row, most - len(prompt) :], mask[row, most - len(prompt) :] = torch.tensor(prompt), 1
    for how in (
        {"repetition_penalty": 1.3, "do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3, "num_return_sequences": 2},
    ):
        found = []
        for model in (one.model, one.face):
            torch.manual_seed(5)
            found.append(model.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=7, **how))
        assert torch.equal(*found), how
    assert one.opened.tracker.builds == one.builds, "nothing is compiled after the start"
    with pytest.raises(InvalidInputError, match="41 tokens; (at most 40 were compiled|the encoder takes 1 to 40)"):
        one.face.generate(torch.ones(1, 41, dtype=torch.int64), max_new_tokens=2)
    if kind != "bloom":
        with pytest.raises(InvalidInputError, match="without cache_implementation"):
            one.face.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(InvalidInputError, match="output_attentions is not supported"):
        one.face.generate(
            ids, attention_mask=mask, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
        )
    assert "forward" not in vars(one.model), "the original is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_the_model_demands_of_its_tokens(kind: str) -> None:
    model = seq2seq(kind)
    config = model.generation_config
    demands: list[dict[str, Any]] = [
        {"forced_bos_token_id": 7, "forced_eos_token_id": EOS, "no_repeat_ngram_size": 2},
        {"suppress_tokens": [5, 6, 8], "begin_suppress_tokens": [EOS, 9], "min_length": 6},
        {"bad_words_ids": [[11], [12, 13]], "min_new_tokens": 4},
    ]
    for given in demands:
        config.update(**given)
        rule = Rules(config, frozenset({EOS}), encodes=True)
        engine = EagerEngine(model, max_length=64, max_waiting=9, eos=frozenset({EOS}), rule=rule)
        for prompt in prompts(9, 4):
            assert tokens(list(engine.submit(prompt, Sampling(8)))) == written(model, prompt, max_new_tokens=8), given
        engine.close()
        config.update(**dict.fromkeys(given))
    config.update(encoder_no_repeat_ngram_size=2)
    assert Rules(config, frozenset(), encodes=True).unsupported == ("encoder_no_repeat_ngram_size",)


@pytest.mark.slow
def test_choices_seeds_and_log_probabilities(served: Callable[[str], Served]) -> None:
    engine = served("t5").engine
    (prompt,) = prompts(6)
    how = Sampling(8, temperature=1.0, top_p=0.9, seed=3, n=2, logprobs=20, ignore_eos=True)
    first, again = (list(engine.submit(prompt, how)) for _ in range(2))
    assert first == again or sorted(map(repr, first)) == sorted(map(repr, again))
    assert tokens(first, 0) != tokens(first, 1)
    token = next(piece.tokens[0] for piece in first if piece.choice == 0)
    assert len(token.top) == 20 and list(token.top) == sorted(token.top, key=lambda pair: -pair[1])
    assert token.logprob == pytest.approx(dict(token.top).get(token.id, token.logprob))
    penalized = list(engine.submit(prompt, Sampling(8, repetition_penalty=5.0, ignore_eos=True)))
    assert len(set(tokens(penalized))) > len(set(tokens(list(engine.submit(prompt, Sampling(8, ignore_eos=True))))))


@pytest.mark.slow
def test_limits_cancelling_and_the_end(served: Callable[[str], Served]) -> None:
    one = served("t5")
    found = opened(one.folder, one.cache, {"verify": {"against": "off"}}, max_waiting=1, cache_gb=0.00005)
    engine = found.engine
    assert found.facts["passed"] is None and found.facts["cache_bytes"] == 40_960
    (prompt,) = prompts(6)
    for wrong, sampling, message in (
        (prompt, Sampling(35), "has 6 tokens, and max_tokens is 35: 41 together, of at most 40"),
        ([], Sampling(3), "at least one of the prompt"),
        ([5, VOCABULARY], Sampling(3), f"token 1 of the prompt is {VOCABULARY}; tokens are 0 to {VOCABULARY - 1}"),
        (prompt, Sampling(3, top_p=0.0), "top_p must be above 0"),
        (prompt, Sampling(3, logprobs=VOCABULARY + 1), f"logprobs can be at most {VOCABULARY}"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            engine.submit(wrong, sampling)
    streams = []
    with pytest.raises(BusyError, match="already wait"):
        while True:
            streams.append(engine.submit(prompt, Sampling(30, ignore_eos=True)))
    streams[-1].cancel()
    assert list(streams[-1])[-1].finish == "cancelled"
    assert len(tokens(list(streams[0]))) == 30
    load = engine.load()
    assert load.generated_tokens >= 30 and load.prompt_tokens >= 12
    assert engine.dead is None
    engine.close()
    with pytest.raises(GenerationError, match="closed"):
        engine.submit(prompt, Sampling(3))


SECOND = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_compile_engine import Sampling, opened, tokens
again = opened(Path(sys.argv[1]), Path(sys.argv[2]))
cache = again.tracker.cache
answer = tokens(list(again.engine.submit(list(range(5, 17)), Sampling(6))))
again.engine.close()
print(json.dumps([cache.traces, cache.compiles, again.facts["model_from_cache"], answer]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(served: Callable[[str], Served]) -> None:
    """In a process of its own, where hashes and addresses are other ones."""
    one = served("t5")
    here = Path(__file__).parent
    folders = [str(each) for each in (here, here.parents[1], here.parents[2] / "scripts")]
    command = [sys.executable, "-c", SECOND, str(one.folder), str(one.cache), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = written(one.model, list(range(5, 17)), max_new_tokens=6)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, True, wanted]
    assert not one.opened.facts["model_from_cache"]


@pytest.mark.slow
def test_a_step_that_fails_costs_its_sequence_only(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served("t5").engine
    begin = engine._steps.begin

    def broken(prompt: Any) -> Any:
        if len(prompt) == 7:
            raise ZeroDivisionError("as the test wants")
        return begin(prompt)

    monkeypatch.setattr(engine._steps, "begin", broken)
    bad, good = (engine.submit(prompt, Sampling(4, ignore_eos=True)) for prompt in prompts(7, 6))
    with pytest.raises(GenerationError, match="ZeroDivisionError: as the test wants"):
        list(bad)
    assert len(tokens(list(good))) == 4


@pytest.mark.slow
def test_other_weights_are_refused(served: Callable[[str], Served], tmp_path: Path, monkeypatch: Any) -> None:
    one = served("t5")
    from torchserve_openvino.tasks.generation import compiling

    other = seq2seq("t5")
    with torch.no_grad():
        other.decoder.block[0].layer[1].EncDecAttention.v.weight.mul_(1.5)
    monkeypatch.setattr(compiling, "EagerSteps", lambda model: EagerSteps(other))
    with pytest.raises(VerificationError, match="differs from eager PyTorch"):
        opened(one.folder, one.cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generate", "key"),
    [
        ({"weights": "int8"}, "weights"),
        ({"kv_cache": "u8"}, "kv_cache"),
        ({"prefix_caching": True}, "prefix_caching"),
        ({"dynamic_quantization": True}, "dynamic_quantization"),
        ({"cache_gb": 1e-9}, "cache_gb"),
    ],
)
def test_settings_of_the_other_engine(generate: Any, key: str, served: Callable[[str], Served]) -> None:
    one = served("t5")
    with pytest.raises(ConfigError, match=rf"generate.{key}"):
        opened(one.folder, one.cache, **generate)


def test_the_engine_is_chosen_by_the_model() -> None:
    def chosen(model: Any, **generate: Any) -> Any:
        config = load_serving_config({"handler": {"openvino": {"generate": {**generate}}}})
        return choose(config.openvino.generate, model.config)

    pytest.importorskip("openvino_genai")
    assert chosen(tiny("llama")).engine == "genai"
    assert chosen(tiny("llama"), engine="compile").why == "generate.engine"
    for model, why in (
        (seq2seq("t5"), "t5 has an encoder"),
        (tiny("gemma2"), "attn_logit_softcapping"),
        (tiny("bloom"), "BloomForCausalLM"),
    ):
        assert chosen(model).engine == "compile" and why in chosen(model).why
    assert chosen(tiny("mistral"), max_length=400, max_tokens=9).engine == "compile"


def test_lengths() -> None:
    assert places_of(seq2seq("t5").config, None) == 1024
    assert places_of(seq2seq("t5", n_positions=64).config, None) == 64
    assert places_of(seq2seq("t5", n_positions=64).config, 200) == 200, "distances do not end"
    assert places_of(tiny("mistral").config, 500) == 500, "the window is kept to"
    with pytest.raises(ConfigError, match="was made for 64 tokens .max_position_embeddings.: set 64 or less"):
        places_of(seq2seq("bart").config, 65)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_without_a_mask_padding_of_the_graphs_is_not_attended_to(kind: str, served: Callable[[str], Served]) -> None:
    one = served(kind)
    ids, start = torch.tensor(prompts(9)), torch.tensor([[one.model.config.decoder_start_token_id]])
    with torch.no_grad():
        expected = one.model(input_ids=ids, decoder_input_ids=start).logits[:, -1]
        for how in ({"input_ids": ids}, {"encoder_outputs": one.model.get_encoder()(input_ids=ids)}):
            got = one.face(decoder_input_ids=start, **how).logits[:, -1]
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


class Steps:
    """Steps of a made-up model: the most probable token is always the same one."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Any]] = []

    def begin(self, prompt: Any) -> Any:
        work = Work(prompt)
        self.made.append(weakref.ref(work))
        return work


class Work:
    def __init__(self, prompt: Any) -> None:
        self.tokens = list(prompt)

    def advance(self) -> torch.Tensor:
        return torch.tensor([0.0, 2.0, 3.0, 1.0, 1.0])


LIMITS = StepLimits(64, 9, frozenset({1}), 4, 5)


def first_of(engine: SteppingEngine, **how: Any) -> list[int]:
    return tokens(list(engine.submit([3], Sampling(2, **how))))


def test_rules_hold_beyond_the_end_and_not_for_the_proof() -> None:
    def rule(seen: Any, generated: int, most: int, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([2]), -torch.inf)

    engine = SteppingEngine(Steps(), LIMITS, rule)
    try:
        assert first_of(engine) == [1]
        assert first_of(engine, ignore_eos=True) == [1, 1]
        assert first_of(engine, ignore_eos=True, bare=True) == [2, 2]
    finally:
        engine.close()


def test_a_sequence_that_has_ended_keeps_no_cache() -> None:
    steps = Steps()
    engine = SteppingEngine(steps, LIMITS)
    try:
        streams = [engine.submit([3], Sampling(2)) for _ in range(3)]
        read = [list(stream) for stream in streams]
        for _ in range(100):
            gc.collect()
            if not any(work() for work in steps.made):
                break
            time.sleep(0.05)
        assert len(read) == len(streams) == 3 and not any(work() for work in steps.made)
    finally:
        engine.close()


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    engine = SteppingEngine(Steps(), LIMITS)
    try:
        # Of the two most probable tokens, the first alone has 73 %: of all of them it would have 58 %.
        how = {"temperature": 1.0, "top_k": 2}
        assert {token for seed in range(40) for token in first_of(engine, **how, top_p=0.7, seed=seed)} == {2}
        assert {token for seed in range(40) for token in first_of(engine, **how, seed=seed)} == {1, 2}
    finally:
        engine.close()
