"""A handler of a user's own, served by `handler.openvino.wrap` alone."""

import concurrent.futures
import json

import pytest
import torch
import transformers
from torchserve_process import TorchServeProcess, handler_path, loaded

import example_handlers
from hub_handler import TRANSFORMERS
from hub_models import minilm, text_model
from language_models import prompts, saved

pytestmark = pytest.mark.slow

CONFIG = """
batchSize: 4
maxBatchDelay: 50
minWorkers: 1
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  mode: sequence_classification
  max_length: 24
  openvino:
    wrap: own_transformers.py
    warmup: {samples: [sample.txt]}
    fallback: {allow: [], on_violation: refuse}
"""
TEXTS = ["The new virus changed the world.", "Nobody in Berlin knows.", "A report, at last!", "rain"]


def test_hugging_faces_example_is_served_on_openvino(server: TorchServeProcess, tmp_path) -> None:
    minilm()
    folder = text_model("text_classifier", tmp_path / "saved")
    (tmp_path / "own_transformers.py").write_text(TRANSFORMERS)
    (tmp_path / "sample.txt").write_text(TEXTS[0])
    (tmp_path / "index_to_name.json").write_text('{"0": "zero", "1": "one", "2": "two"}')
    extra = [path for path in folder.iterdir() if path.name != "model.safetensors"]
    extra += [tmp_path / name for name in ("own_transformers.py", "sample.txt", "index_to_name.json")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = tokenizer(TEXTS, max_length=24, padding="max_length", truncation=True, return_tensors="pt")
        wanted = [["zero", "one", "two"][best] for best in model(inputs.input_ids, inputs.attention_mask)[0].argmax(1)]
    with loaded(
        server, "wrapped", handler=handler_path("tensor"), config=CONFIG,
        serialized_file=folder / "model.safetensors", extra_files=extra,
    ):  # fmt: skip
        url = f"{server.inference_url}/predictions/wrapped"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda text: server.http.post(url, content=text.encode()), TEXTS * 4))
        assert [each.text for each in answers] == wanted * 4
        report = server.describe("wrapped")
    assert report["summary"]["coverage"] == 1.0 and not report["fallbacks"] and report["verify"]["passed"]
    assert report["serving"]["compiles_after_ready"] == 0


def test_generate_of_a_users_own_handler_is_compiled(server: TorchServeProcess, tmp_path) -> None:
    (tmp_path / "saved").mkdir()
    model = saved(tmp_path / "saved", "llama")
    (tmp_path / "own_generates.py").write_text(example_handlers.GENERATES.replace("AUTO", "AutoModelForCausalLM"))
    given = prompts(3, 17, 30, 9, 24)
    more = {"min_new_tokens": 6}
    bodies = [json.dumps({"ids": each, "more": more}).encode() for each in given]
    (tmp_path / "sample.json").write_bytes(bodies[0])
    config = """
batchSize: 2
maxBatchDelay: 50
minWorkers: 1
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  openvino:
    wrap: own_generates.py
    compile: [model.generate]
    generate: {max_length: 40, max_tokens: 16, step_tokens: 8, proof_tokens: 5}
    warmup: {samples: [sample.json]}
    fallback: {allow: [], on_violation: refuse}
"""
    extra = [*(tmp_path / "saved").iterdir(), tmp_path / "own_generates.py", tmp_path / "sample.json"]
    with loaded(server, "generates", handler=handler_path("tensor"), config=config, extra_files=extra):
        url = f"{server.inference_url}/predictions/generates"
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            answers = [each.json() for each in pool.map(lambda body: server.http.post(url, content=body), bodies)]
        for prompt, answer in zip(given, answers, strict=True):
            ids = torch.tensor([prompt])
            how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0, **more}
            assert answer[-6:] == model.generate(ids, **how)[0, -6:].tolist()
        long = server.http.post(url, content=json.dumps({"ids": prompts(36)[0], "more": more}).encode())
        assert long.status_code == 400 and "40 were compiled" in long.json()["message"]
        report = server.describe("generates")
    assert report["summary"]["coverage"] == 1.0 and not report["fallbacks"]
    assert {part["passed"] for part in report["verify"]["parts"].values()} == {True}
    assert report["serving"]["compiles_after_ready"] == 0
    assert report["config"]["generate"]["tokens_compared"] == report["config"]["generate"]["tokens_equal"] > 0
