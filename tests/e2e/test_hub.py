"""A Hugging Face model from its folder to answers over REST: packaged without code, batched, padded, isolated."""

import concurrent.futures
import json
import random
import subprocess
import sys

import httpx
import pytest
import torch
import transformers
from torchserve_process import ROOT, TorchServeProcess

from hub_models import minilm, text_model

WORDS = "the train to Paris leaves at noon and nobody in London knows why it never came back".split()
CONFIG = """
batchSize: 4
maxBatchDelay: 50
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  openvino:
    text: {lengths: [16, 64]}
    batching: {buckets: [4]}
    fallback: {allow: [], on_violation: refuse}
"""


@pytest.fixture(scope="module", params=[pytest.param("sentence_embedder", marks=pytest.mark.slow), "token_classifier"])
def served(request, server: TorchServeProcess, tmp_path_factory) -> tuple[str, str]:
    """A model's name and folder, registered from an archive that the command made."""
    task, place = request.param, tmp_path_factory.mktemp(request.param)
    folder = minilm() if task == "sentence_embedder" else text_model(task, place / "saved")
    config = place / "model-config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--model-name", task]
    command += ["--config-file", config, "--export-path", server.model_store]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and f"task: {task}" in done.stdout, done.stdout + done.stderr
    answer = server.register(f"{task}.mar", task)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(60)}"
    server.wait_ready(task)
    return task, str(folder)


def expected(task: str, folder: str, texts: list[str]) -> list:
    if task == "token_classifier":
        reference = transformers.pipeline("token-classification", model=folder, aggregation_strategy="simple")
        return [reference(text) for text in texts]
    model, tokenizer = (kind.from_pretrained(folder) for kind in (transformers.AutoModel, transformers.AutoTokenizer))
    with torch.no_grad():
        means = [model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts]
    return [torch.nn.functional.normalize(mean)[0].tolist() for mean in means]


def test_answers_of_mixed_lengths_equal_eagers_and_nothing_compiles(served, server: TorchServeProcess) -> None:
    task, folder = served
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 50))) for _ in range(24)]
    with (
        httpx.Client(base_url=server.inference_url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda text: client.post(f"/predictions/{task}", json={"inputs": text}), texts))
        assert [answer.status_code for answer in answers] == [200] * 24
        for answer, wanted in zip(answers, expected(task, folder, texts), strict=True):
            got = answer.json()
            if task == "token_classifier":
                assert [(e["entity_group"], e["start"], e["end"]) for e in got] == [
                    (e["entity_group"], e["start"], e["end"]) for e in wanted
                ]
                assert [e["score"] for e in got] == pytest.approx([e["score"] for e in wanted], abs=2e-3)
            else:
                torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-3, atol=1e-3)
        several = client.post(f"/predictions/{task}", json={"inputs": [texts[0], ""]})
        assert several.status_code == 207 and several.json()[1]["code"] == 400
        bare = client.post(f"/predictions/{task}", content=texts[0].encode())
        assert bare.status_code == 200 and len(bare.json()) == len(answers[0].json())
        unexplained = client.post(f"/explanations/{task}", content=texts[0].encode())
        assert unexplained.status_code == 501 and "no explanations" in unexplained.json()["message"]
        long = client.post(f"/predictions/{task}", json={"inputs": "word " * 100})
        assert long.status_code == 400 and "102 tokens" in long.json()["message"]
    report = server.describe(task)
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] and report["verify"]["passed"]
    assert report["serving"]["compiles_after_ready"] == 0
    assert report["task"]["name"] == task and "properties" in report["task"]["parameters"]


def test_the_client_shows_answers_and_errors(served, server: TorchServeProcess) -> None:
    task, _ = served

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "predict.py", task, *arguments, "--url", server.inference_url]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    shown = ask("Ada Lovelace lived in London.")
    assert shown.returncode == 0 and ("384 numbers" if task == "sentence_embedder" else "entity_group") in shown.stdout
    plain = ask('{"inputs": ["Ada", "Grace"]}', "--json")
    assert plain.returncode == 0 and len(json.loads(plain.stdout)) == 2
    refused = ask("Ada", "--parameters", '{"x": 1}')
    assert refused.returncode == 1 and "400: unknown parameter 'x'" in refused.stderr
