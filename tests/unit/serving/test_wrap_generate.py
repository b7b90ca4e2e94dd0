"""`handler.openvino.compile: [model.generate]`: calls of transformers' `generate` run by compiled graphs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_handlers import report_of
from test_wrap_examples import eager, served

import example_handlers
from language_models import prompts, seq2seq, tiny
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import InvalidInputError, ModelLoadError
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.compiled.hf_adapter import with_compiled_forward
from torchserve_openvino.generation.compiled.layout import GraphSizes
from torchserve_openvino.generation.compiled.trials import Trials
from torchserve_openvino.serving.torchserve.base import worker_of

pytest.importorskip("transformers")
SMALL = {"max_length": 40, "max_tokens": 16, "step_tokens": 8, "proof_tokens": 5}


def asked(ids: list[int], **more: Any) -> bytes:
    return json.dumps({"ids": ids, "more": more}).encode()


def generates(
    archive: Any, kind: str, sample: bytes | None = None, *, dtype: Any = None, **section: Any
) -> tuple[Any, Any]:
    encodes = kind in {"t5", "bart"}

    def fill(folder: Path) -> None:
        model = seq2seq(kind) if encodes else tiny(kind)
        (model.to(dtype) if dtype else model).save_pretrained(folder)

    auto = "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"
    source = example_handlers.GENERATES.replace("AUTO", auto)
    own = {"compile": ["model.generate"], "generate": SMALL, **section}
    return served(archive, source, fill, sample or asked(*prompts(9)), batch_size=2, **own)


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("t5", "bart", "llama", "bloom"))]
)
def test_answers_are_those_of_eager_pytorch(archive, kind) -> None:
    made, handler = generates(archive, kind)
    first, second = prompts(21, 3)
    for bodies in (
        [asked(first)], [asked(first), asked(second)], [asked(second, num_beams=3)],
        [asked(first, repetition_penalty=1.4, no_repeat_ngram_size=2)],
        [asked(first, max_length=25, max_new_tokens=None)],
        [asked(second, return_dict_in_generate=True, output_scores=True)],
    ):  # fmt: skip
        assert made.handle(handler, *bodies) == eager(handler, *bodies), bodies
    if kind == "gpt2":
        refused_alone(made, handler)
    report, outside = report_of(handler)
    assert not outside and not report["fallbacks"] and report["summary"]["coverage"] == 1.0
    assert report["serving"]["compiles_after_ready"] == 0 and worker_of(handler).report.tracker.verify.passed
    facts = report["config"]["generate"]
    assert facts["tokens_compared"] == facts["tokens_equal"] >= 5 * 4 and facts["max_length"] == 40


def refused_alone(made: Any, handler: Any) -> None:
    first, second = prompts(36, 3)
    answers = made.handle(handler, asked(first), asked(second))
    assert "36 tokens, and gets up to 42; 40 were compiled (handler.openvino.generate.max_length)" in str(answers[0])
    assert made.status(0) == 400 and answers[1:] == eager(handler, asked(second))
    for more, said in (
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is True"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is 2"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"token_type_ids": [[1, 1, 1]]}, "token_type_ids is given"),
        ({"max_new_tokens": 38}, "gets up to 41"),
    ):
        (answer,) = made.handle(handler, asked(second, **more))
        assert made.status(0) == 400 and said in str(answer), more


@pytest.mark.slow
def test_or_runs_in_eager_pytorch_and_is_counted(archive) -> None:
    made, handler = generates(archive, "gpt2", batching={"outside": "compile"})
    for body in (asked(*prompts(36)), asked(*prompts(5), cache_implementation="static")):
        assert made.handle(handler, body) == eager(handler, body)
    report, outside = report_of(handler)
    assert outside["model.generate"]["count"] == 2 and report["serving"]["compiles_after_ready"] == 0


def test_what_cannot_be_compiled_is_refused_before_anything_is(archive) -> None:
    with pytest.raises(ModelLoadError, match="sample's call cannot be compiled: guidance_scale is 1.5.*remove"):
        generates(archive, "gpt2", asked(*prompts(4), guidance_scale=1.5))
    with pytest.raises(ModelLoadError, match=r"weights of torch.bfloat16: load it in torch.float32"):
        generates(archive, "gpt2", dtype=torch.bfloat16)
    for wrong, said in (
        ({"engine": "genai"}, "generate.engine.*is genai"),
        ({"proof_prompts": ["a text"]}, "generate.proof_prompts.*warmup.samples"),
        ({"weights": "int8"}, "generate.weights.*is int8"),
        ({"max_length": 600, "max_tokens": 9}, "generate.max_length.*512"),
    ):
        with pytest.raises(RuntimeError, match=said):
            generates(archive, "gpt2", generate={**SMALL, **wrong})


@pytest.mark.slow
def test_without_samples_and_from_the_cache(archive, tmp_path) -> None:
    found = []
    for _ in range(2):
        made, handler = generates(
            archive, "gpt2", options={"model_caching": True, "cache_dir": str(tmp_path / "cache")}, warmup={}
        )
        body = asked(*prompts(7))
        assert made.handle(handler, body) == eager(handler, body)
        found.append(report_of(handler)[0])
    assert [each["cache"]["compiles"] > 0 for each in found] == [True, False]
    assert all(each["config"]["generate"]["tokens_compared"] > 0 for each in found)


@pytest.mark.slow
def test_the_proof_finds_another_model(archive) -> None:
    one, other = tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.h[0].attn.c_attn.weight.mul_(1.5)
    generation = CompiledGeneration(one, GraphSizes(40, (8,)))
    for model, passed in ((one, True), (other, False)):
        proof = Trials(one, type(one).generate, model.generate, generation, 6).run([], "f32", VerifySection())
        assert proof.passed is passed and proof.tokens_compared > 0
    assert "cosine similarity" in proof.problems[0]


def test_what_graphs_do_not_take_is_not_ignored() -> None:
    face = with_compiled_forward(CompiledGeneration(tiny("gpt2"), GraphSizes(40, (8,))))
    ids = torch.tensor(prompts(5))
    with pytest.raises(InvalidInputError, match="token_type_ids is not taken"):
        face(ids, token_type_ids=torch.ones_like(ids))


@pytest.mark.slow
def test_whisper(archive) -> None:
    from hub_audio_models import encoded, recording
    from speech_models import whisper

    def fill(folder: Path) -> None:
        whisper(folder)

    sound = encoded(recording(1.0))
    made, handler = served(
        archive, example_handlers.LISTENS, fill, sound, compile=["model.generate"], generate={"proof_tokens": 5}
    )
    for seed in (0, 1):
        body = encoded(recording(1.5, seed))
        assert made.handle(handler, body) == eager(handler, body)
    report, outside = report_of(handler)
    facts = report["config"]["generate"]
    assert not outside and report["summary"]["coverage"] == 1.0 and report["serving"]["compiles_after_ready"] == 0
    assert facts["tokens_compared"] == facts["tokens_equal"] > 0 and worker_of(handler).report.tracker.verify.passed
