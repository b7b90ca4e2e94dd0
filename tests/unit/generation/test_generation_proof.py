"""The proof before READY: what it compares, what it accepts, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import OFF, opened, settings

from language_models import EOS, VOCABULARY, greedy, prompts, saved, tiny
from torchserve_openvino.backend.runtime.build import device_capabilities
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import BusyError, ConfigError, VerificationError
from torchserve_openvino.generation.text.engine import EngineLoad, GeneratedToken, Piece, Sampling
from torchserve_openvino.generation.text.engine_settings import properties
from torchserve_openvino.generation.text.expected import Expected, Nearness, expect, made_up
from torchserve_openvino.generation.text.generation_proof import DRIFT, TIE, GenerationProof, prove
from torchserve_openvino.generation.text.opening import open_engine

pytest.importorskip("transformers")
NEAR = Nearness(cosine=1.0, least_cosine=1.0, max_abs=1e-6, scale=3.0, top1=1.0)


class Played:
    """An engine that answers from a list: for each number of tokens given, the tokens that follow."""

    max_length = 100

    def __init__(self, answers: dict[int, list[tuple[int, float]]], at_once: int = 9) -> None:
        self.answers, self.at_once, self.open = answers, at_once, 0

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        if self.open == self.at_once:
            raise BusyError("too many")
        self.open += 1

        def pieces() -> Any:
            for token, logprob in self.answers[len(prompt)][: sampling.max_tokens]:
                yield Piece(0, (GeneratedToken(token, logprob),))
            self.open -= 1

        return pieces()

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0.0, 0, 0)

    def close(self) -> None:
        pass


def place(best: int, *rivals: tuple[int, float]) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of a place; the best has the log probability -1."""
    return (best, -1.0), *rivals


WANTED = Expected((7, 8), (1, 2, 3), (place(1), place(2, (9, -1.0 - TIE / 2), (6, -1.5)), place(3)))


def proven(answers: dict[int, list[tuple[int, float]]], **given: Any) -> GenerationProof:
    return prove(
        Played(answers), given.get("expected", [WANTED]), given.get("near", NEAR), given.get("forms", ["f32"]),
        VerifySection(**given.get("verify", {})),
    )  # fmt: skip


class TestWhatCountsAsEqual:
    def test_all_tokens(self) -> None:
        found = proven({2: [(1, -1.0), (2, -1.0 + DRIFT / 2), (3, -1.0)]})
        assert found.passed and (found.tokens_compared, found.tokens_equal, found.ties) == (3, 3, 0)
        assert found.max_logprob_difference == pytest.approx(DRIFT / 2)

    @pytest.mark.parametrize("form", ["f32", "int8"])
    def test_an_answer_that_ends_early_is_another_one(self, form: str) -> None:
        found = proven({2: [(1, -1.0), (2, -1.0)]}, forms=[form])
        assert not found.passed and "1 tokens of eager PyTorch's are missing" in found.problems[0]
        assert not proven({2: []}, forms=[form]).passed

    def test_a_tie_is_no_difference_and_the_rest_is_compared(self) -> None:
        found = proven({2: [(1, -1.0), (9, -1.0), (5, -1.0)], 4: [(3, -1.0)]})
        assert found.passed and (found.tokens_compared, found.tokens_equal, found.ties) == (3, 2, 1)
        found = proven({2: [(1, -1.0), (9, -1.0), (5, -1.0)], 4: [(4, -1.0)]})
        assert not found.passed and found.first_difference is not None and found.first_difference.place == 2

    @pytest.mark.parametrize(("token", "gap"), [(6, 0.5), (5, None)])
    def test_another_token_is_a_difference(self, token: int, gap: float | None) -> None:
        found = proven({2: [(1, -1.0), (token, -1.0), (3, -1.0)]})
        assert not found.passed and found.first_difference is not None
        one = found.first_difference
        assert (one.prompt, one.prompt_tokens, one.place, one.expected, one.got) == (0, 2, 1, 2, token)
        assert one.gap == (None if gap is None else pytest.approx(gap))
        assert f"token 1 of a prompt with 2 tokens is {token}, not 2" in found.problems[0]

    def test_other_probabilities_are_a_difference(self) -> None:
        found = proven({2: [(1, -1.0), (2, -1.0), (3, -1.0 + 2 * DRIFT)]})
        assert found.problems and "log probability differs by 0.002" in found.problems[0]
        assert not proven({2: [(1, float("nan")), (2, -1.0), (3, -1.0)]}).passed

    def test_one_wrong_prompt_does_not_hide_the_others(self) -> None:
        other = replace(WANTED, prompt=(7, 8, 9))
        right = [(1, -1.0), (2, -1.0), (3, -1.0)]
        found = proven({2: [(0, -1.0)], 3: right}, expected=[WANTED, other])
        assert (found.prompts, found.tokens_compared, found.tokens_equal) == (2, 4, 3)

    def test_a_busy_engine_gets_prompts_one_after_the_other(self) -> None:
        right = [(1, -1.0), (2, -1.0), (3, -1.0)]
        engine = Played({2: right}, at_once=1)
        assert prove(engine, [WANTED] * 3, NEAR, ["f32"], VerifySection()).tokens_equal == 9


class TestOtherFormats:
    def test_the_logits_decide(self) -> None:
        wrong = {2: [(0, -1.0), (0, -1.0), (0, -1.0)]}
        found = proven(wrong, forms=["int8", "f32"], near=replace(NEAR, cosine=0.991))
        assert found.passed and found.first_difference is not None and found.tokens_equal == 0
        found = proven(wrong, forms=["int8", "f32"], near=replace(NEAR, cosine=0.98))
        assert found.problems == ("the logits have a cosine similarity of 0.980000 with eager PyTorch's, not 0.99",)

    def test_the_yaml_decides_first(self) -> None:
        right = {2: [(1, -1.0), (2, -1.0), (3, -1.0)]}
        assert not proven(right, near=replace(NEAR, least_cosine=0.99)).passed
        assert proven(right, near=replace(NEAR, least_cosine=0.99), verify={"min_cosine": 0.9}).passed
        assert (
            "a logit differs by 0.1"
            in proven(right, near=replace(NEAR, max_abs=0.1), verify={"max_abs": 0.01}).problems[0]
        )
        assert "in 50.0% of places" in proven(right, near=replace(NEAR, top1=0.5), verify={"min_top1": 0.6}).problems[0]

    def test_no_number_is_no_similarity(self) -> None:
        assert not proven({2: [(1, -1.0)]}, near=replace(NEAR, least_cosine=float("nan"))).passed


def test_the_reference_is_what_transformers_generates() -> None:
    model = tiny("opt")
    given = prompts(3, 20)
    found = expect(model, given, 12)
    assert [list(each.tokens) for each in found] == [greedy(model, prompt, 12) for prompt in given]
    with torch.no_grad():
        row = model(torch.tensor([given[0]])).logits[0, -1].log_softmax(-1)
    assert found[0].rivals[0][0] == (found[0].tokens[0], pytest.approx(float(row.max()), abs=1e-5))
    assert found[0].gap(0, found[0].tokens[0]) == 0.0 and len(found[0].rivals[0]) == 8


def test_made_up_prompts() -> None:
    found = made_up(VOCABULARY, frozenset({EOS}), 30)
    assert [len(each) for each in found] == [3, 17, 30] and found == made_up(VOCABULARY, frozenset({EOS}), 30)
    assert all(0 <= token < VOCABULARY and token != EOS for each in found for token in each)


class TestOpening:
    """With the real engine."""

    @pytest.fixture(autouse=True)
    def genai(self) -> None:
        pytest.importorskip("openvino_genai")

    def test_the_report(self, served: Any) -> None:
        facts = served("llama").opened.facts
        assert facts["passed"] and facts["prompts"] == 4 and facts["tokens_compared"] == facts["tokens_equal"] == 96
        assert facts["logits"]["cosine"] > 0.99999 and facts["logits"]["top1"] == 1.0
        assert facts["max_logprob_difference"] < 1e-4
        assert facts["properties"]["INFERENCE_PRECISION_HINT"] == facts["properties"]["KV_CACHE_PRECISION"] == "f32"
        assert facts["properties"]["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0" and not facts["dynamic_quantization"]
        assert facts["cache_bytes"] == facts["cache_tokens"] * 2 * 2 * 16 * 4

    def test_a_wrong_reference_is_refused_or_told(
        self, served: Any, filled: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = served("llama").folder
        from torchserve_openvino.generation.text import making

        def other(model: Any, given: Any, count: int) -> list[Expected]:
            return expect(tiny("llama", rms_norm_eps=0.5), given, count)

        monkeypatch.setattr(making, "expect", other)
        with pytest.raises(VerificationError, match="generated token . of a prompt with 3 tokens"):
            opened(folder, filled, proof_tokens=20)
        found = opened(folder, filled, proof_tokens=20, verify={"on_violation": "warn"})
        found.engine.close()
        assert not found.facts["passed"] and found.facts["first_difference"]["prompt"] == 0

    @pytest.mark.slow
    def test_nothing_is_compared_if_the_yaml_says_so(self, served: Any, exports: Store) -> None:
        found = opened(served("gpt2").folder, exports, verify=OFF)
        found.engine.close()
        assert found.proof is None and found.facts["tokens_compared"] == 0 and found.facts["passed"] is None

    def test_prompts_of_the_yaml(self, served: Any, exports: Store) -> None:
        base = settings(served("gpt2").folder, proof_tokens=5)
        found = open_engine(replace(base, prompts=prompts(4, 9)), exports)
        found.engine.close()
        assert (found.facts["prompts"], found.facts["tokens_compared"]) == (2, 10)
        with pytest.raises(ConfigError, match=r"proof_prompts.*508 tokens.* 5 more .* exceeds 512"):
            open_engine(replace(base, prompts=[[5] * 508]), exports)

    @pytest.mark.slow
    @pytest.mark.parametrize("weights", ["int8", "int4"])
    @pytest.mark.parametrize("kv_cache", ["f32", "u8"])
    def test_compressed_weights_and_cache(self, tmp_path: Path, exports: Store, weights: str, kv_cache: str) -> None:
        pytest.importorskip("nncf")
        # Larger random weights turn the rounding of 4 bits into other directions, not just other lengths.
        saved(tmp_path, "llama", hidden_size=64, intermediate_size=128, initializer_range=0.02)
        found = opened(tmp_path, exports, weights=weights, kv_cache=kv_cache)
        found.engine.close()
        assert found.facts["passed"] and found.facts["logits"]["cosine"] < 0.999999
        assert found.facts["cache_bytes"] == found.facts["cache_tokens"] * 2 * 2 * (
            32 * 4 if kv_cache == "f32" else 32 + 16
        )

    @pytest.mark.slow
    def test_bf16(self, served: Any, exports: Store) -> None:
        folder = served("llama").folder
        if "BF16" not in device_capabilities("CPU"):
            with pytest.raises(ConfigError, match=r"generate.weights: is bf16, which CPU .* does not support; set f32"):
                opened(folder, exports, weights="bf16")
            return
        for given in ({"weights": "bf16"}, {"weights": "bf16", "kv_cache": "u8"}):
            # With one thread, it is exported with its gated products apart.
            found = opened(folder, exports, threads=2, **given)
            found.engine.close()
            assert found.facts["passed"] and 0.995 <= found.facts["logits"]["cosine"] < 0.999999
            assert found.facts["model_from_cache"], "the precision of computation is none of the model"

    @pytest.mark.slow
    @pytest.mark.skipif("BF16" not in device_capabilities("CPU"), reason="this CPU computes no bfloat16")
    def test_bf16_on_one_thread(self, tmp_path: Path, exports: Store) -> None:
        """OpenVINO's kernel for gated products divides by 0 there, and the process dies."""
        saved(tmp_path, "llama", hidden_size=256, intermediate_size=512)
        found = opened(tmp_path, exports, weights="bf16", threads=1)
        found.engine.close()
        assert found.facts["passed"]

    def test_another_device_is_refused(self, served: Any, exports: Store) -> None:
        with pytest.raises(ConfigError, match=r"options.device.*is GPU; text generation is tested on CPU only"):
            open_engine(replace(settings(served("gpt2").folder), device="GPU"), exports)

    def test_a_cache_without_room_is_refused(self, served: Any, exports: Store) -> None:
        with pytest.raises(ConfigError, match=r"cache_gb.*less than a page of 32 tokens"):
            opened(served("gpt2").folder, exports, cache_gb=1e-9)


def test_properties_of_the_caller_win(tmp_path: Path) -> None:
    base = settings(tmp_path, threads=3, dynamic_quantization=True, weights="int8")
    assert properties(base) == {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 3,
    }  # fmt: skip
    changed = replace(base, config={"INFERENCE_PRECISION_HINT": "bf16"})
    assert properties(changed)["INFERENCE_PRECISION_HINT"] == "bf16"
