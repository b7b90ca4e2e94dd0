"""The official clients of OpenAI and Cohere, pointed at TorchServe."""

import base64
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers
from commands import package
from torchserve_process import TorchServeProcess

from hub_models import text_model

# tests/unit/tasks/test_standard_forms.py has the same clients without a server.
pytestmark = pytest.mark.slow

CONFIG = """
batchSize: 4
maxBatchDelay: 30
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler: {openvino: {text: {lengths: [16]}, batching: {buckets: [4]}, fallback: {allow: []}}}
"""


def serve(server: TorchServeProcess, task: str, place: Path) -> tuple[str, Path]:
    """Packs and registers a small model; returns the base URL for clients, and the model's folder."""
    folder = text_model(task, place / "saved")
    (place / "model-config.yaml").write_text(CONFIG)
    options = ["--hf", str(folder), "--task", task, "--export-path", str(server.model_store)]
    package(f"torchserve-openvino package --model-name std_{task} --config-file model-config.yaml", place, *options)
    answer = server.register(f"std_{task}.mar", f"std_{task}")
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(60)}"
    server.wait_ready(f"std_{task}")
    return f"{server.inference_url}/predictions/std_{task}/1.0", folder


def test_openai_s_client_gets_eagers_vectors(server: TorchServeProcess, tmp_path: Path) -> None:
    url, folder = serve(server, "sentence_embedder", tmp_path)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    texts = ["Ada Lovelace lived in London.", "Yes"]
    found = client.embeddings.create(model="std_sentence_embedder", input=texts)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text, return_tensors="pt") for text in texts]
    with torch.no_grad():
        expected = torch.stack([model(**row).last_hidden_state.mean(1)[0] for row in rows])
    torch.testing.assert_close(torch.tensor([each.embedding for each in found.data]), expected, rtol=1e-3, atol=1e-3)
    assert found.usage.total_tokens == sum(row["input_ids"].numel() for row in rows)
    assert [each.id for each in client.models.list()] == ["std_sentence_embedder"]
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="std_sentence_embedder", input=["a", "word " * 99])
    assert raised.value.param == "input[1]"
    # The same body at the model's own URL, which clients that send no more than a body are pointed at.
    body = {"input": texts[0], "encoding_format": "base64"}
    answer = httpx.post(f"{server.inference_url}/predictions/std_sentence_embedder", json=body).json()
    vector = torch.frombuffer(bytearray(base64.b64decode(answer["data"][0]["embedding"])), dtype=torch.float32)
    torch.testing.assert_close(vector, expected[0], rtol=1e-3, atol=1e-3)
    assert server.describe("std_sentence_embedder")["serving"]["compiles_after_ready"] == 0
    server.http.delete(f"{server.management_url}/models/std_sentence_embedder")


def test_cohere_s_client_gets_a_ranking(server: TorchServeProcess, tmp_path: Path) -> None:
    cohere = pytest.importorskip("cohere", reason="needs the package cohere")
    url, _ = serve(server, "reranker", tmp_path)
    documents = ["In London.", "At noon.", "Nobody knows why."]
    plain = httpx.post(f"{server.inference_url}/predictions/std_reranker", json={"query": "Where?", "texts": documents})
    client = cohere.ClientV2(api_key="none", base_url=url)
    found = client.rerank(model="std_reranker", query="Where?", documents=documents, top_n=2)
    assert [each.index for each in found.results] == [each["index"] for each in plain.json()[:2]]
    scores = [each["score"] for each in plain.json()[:2]]
    assert [each.relevance_score for each in found.results] == pytest.approx(scores, abs=1e-4)
    with pytest.raises(cohere.errors.BadRequestError, match="documents is an empty list"):
        client.rerank(model="std_reranker", query="Where?", documents=[])
    server.http.delete(f"{server.management_url}/models/std_reranker")
