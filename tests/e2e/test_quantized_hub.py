"""MiniLM in int8 over REST, as docs/quantization.md packages it, with and without its weights in f32."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from commands import package
from torchserve_process import TorchServeProcess

from hub_models import minilm

pytestmark = pytest.mark.slow
pytest.importorskip("nncf")
pytest.importorskip("torchao")

ALIKE = ["How old are you?", "What is your age?"]
OTHER = "The train to Paris leaves at noon."
SENTENCES = [
    *ALIKE, OTHER, "She sells sea shells by the shore.", "Ada Lovelace lived in London.", "It rains, and nobody minds.",
    "The model answers in eight bits.", "When does the museum open on Sundays, and what does a ticket cost?",
    "Bread needs flour, water, salt, and time.", "Is it true that cats sleep for most of the day?",
    "He read the letter twice before he put it back into the drawer.", "Turn left at the church.",
    "The committee has not decided yet whether the bridge will be rebuilt or torn down.", "Good morning!",
]  # fmt: skip


@pytest.mark.parametrize(
    ("keeps_f32", "precision", "served"),
    [(False, None, {"int8"}), (True, "f32", {"f32"}), (True, "auto", {"int8", "f32", "bf16"})],
)
def test_similar_sentences_stay_similar(
    server: TorchServeProcess, tmp_path: Path, keeps_f32: bool, precision: str | None, served: set[str]
) -> None:
    name = f"minilm-{keeps_f32}-{precision}".lower()
    (tmp_path / "requests").mkdir()
    for number, sentence in enumerate(SENTENCES):
        (tmp_path / "requests" / f"{number:02}.json").write_text(json.dumps({"inputs": sentence}))
    section = {"text": {"lengths": [32]}, "quantize": {"max_drop": 0.02, "keep_f32": keeps_f32}}
    if precision is not None:
        section["precision"] = precision
    config = {"batchSize": 2, "maxWorkers": 1, "pt2": {"compile": {"enable": True, "backend": "openvino"}}}
    (tmp_path / "model-config.yaml").write_text(yaml.safe_dump({**config, "handler": {"openvino": section}}))
    command = f"torchserve-openvino package --hf {minilm()} --model-name {name} --quantize int8"
    command += f" --calibration requests/ --config-file model-config.yaml --export-path {server.model_store}"
    made = package(command, tmp_path)
    assert made["quantized"]["keeps_f32"] is keeps_f32 and made["task"] == "sentence_embedder"
    assert (made["bytes"] < 25e6) is not keeps_f32
    assert server.register(f"{name}.mar", name).status_code == 200
    server.wait_ready(name)
    try:
        url = f"{server.inference_url}/predictions/{name}"
        (first, second, other) = torch.tensor(server.http.post(url, json={"inputs": [*ALIKE, OTHER]}).json())
        assert first @ second > 0.6 and max(first @ other, second @ other) < 0.2
        report = server.describe(name)
        assert report["summary"]["precision"] in served and report["summary"]["coverage"] == 1.0
        assert report["verify"]["passed"] and not report["fallbacks"]
        assert report["serving"]["compiles_after_ready"] == 0
        if precision == "auto":
            choice = report["config"]["precision_choice"]
            assert choice["tried"]["int8"]["passed"] and report["summary"]["precision"] == choice["chosen"]
    finally:
        server.http.delete(f"{server.management_url}/models/{name}")
