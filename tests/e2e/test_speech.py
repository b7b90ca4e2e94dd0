"""Whisper over REST: what transformers' pipeline writes, two at a time, with bad requests; and OpenAI's own client."""

import base64
import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from torchserve_process import TorchServeProcess

from documents import blocks, commands
from hub_audio_models import encoded, recording
from speech_models import whisper

pytestmark = pytest.mark.slow

CONFIG = """
batchSize: 2
maxBatchDelay: 200
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  openvino:
    audio: {max_seconds: 5}
    threads: 1
    batching: {buckets: [2]}
    fallback: {allow: [], on_violation: refuse}
"""
NAME = "listener"
# The second and the last are longer than the model's window of 2 s.
HEARD = [np.round(recording(seconds, seed) * 32767).astype(np.int16) for seed, seconds in enumerate((0.5, 3.1, 1.9))]
FILES = [encoded(samples, kind=("WAV", "FLAC")[number % 2]) for number, samples in enumerate(HEARD)]


@pytest.fixture(scope="module")
def folder(server: TorchServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, packaged by the command, and registered."""
    place = tmp_path_factory.mktemp(NAME)
    saved = whisper(place / "saved")
    config = place / "model-config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", saved, "--model-name", NAME]
    command += ["--config-file", config, "--export-path", server.model_store]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "task: speech_recognizer" in done.stdout, done.stdout + done.stderr
    answer = server.register(f"{NAME}.mar", NAME)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(80)}"
    server.wait_ready(NAME)
    return saved


@pytest.fixture(scope="module")
def wanted(folder: Path, one_thread: None) -> list[Any]:
    import transformers

    reference = transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")
    arrays = [(samples / np.float32(32768)).astype(np.float32) for samples in HEARD]
    given = {"num_beams": 1, "language": "de", "task": "transcribe"}
    return [reference(array, return_timestamps=True, generate_kwargs=given) for array in arrays]


def test_recordings_of_one_batch(server: TorchServeProcess, folder: Path, wanted: list[Any]) -> None:
    def ask(place: int) -> httpx.Response:
        url = f"{server.inference_url}/predictions/{NAME}"
        if place == len(FILES):
            return httpx.post(url, content=FILES[0][:-50], timeout=120)
        parameters = {"language": "de", "task": "transcribe", "return_timestamps": True}
        body = {"inputs": base64.b64encode(FILES[place]).decode(), "parameters": parameters}
        return httpx.post(url, json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [0, 1, 2, 3, 2, 1, 0, 3]))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 200, 200, 200, 400]
    for place, answer in zip([0, 1, 2, None, 2, 1, 0, None], answers, strict=True):
        if place is not None:
            chunks = [{**chunk, "timestamp": list(chunk["timestamp"])} for chunk in wanted[place]["chunks"]]
            assert answer.json() == {"text": wanted[place]["text"], "chunks": chunks}
    report = server.describe(NAME)
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] and report["verify"]["passed"]
    assert report["generate"]["passed"] and report["serving"]["compiles_after_ready"] == 0


def test_openais_client(server: TorchServeProcess, folder: Path, wanted: list[Any]) -> None:
    client = openai.OpenAI(
        base_url=f"{server.inference_url}/predictions/{NAME}/1.0/v1", api_key="none", max_retries=0, timeout=120,
        http_client=httpx.Client(trust_env=False),
    )  # fmt: skip
    given: Any = {"model": NAME, "file": ("speech.flac", FILES[1]), "language": "de"}
    verbose = client.audio.transcriptions.create(response_format="verbose_json", **given)
    assert verbose.text == wanted[1]["text"] and verbose.language == "german" and verbose.duration == 3.1
    assert verbose.segments and all(0 <= each.start <= 3.1 for each in verbose.segments)
    assert client.audio.transcriptions.create(**given).text
    srt: Any = client.audio.transcriptions.create(response_format="srt", **given)
    assert srt.startswith("1\n00:00:0") and srt.count(" --> ") == len(verbose.segments)
    translated = client.audio.translations.create(model=NAME, file=("speech.wav", FILES[0]), temperature=0)
    assert isinstance(translated.text, str)
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(model=NAME, file=("a.wav", FILES[0]), language="klingon")
    assert "klingon" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="word"):
        client.audio.transcriptions.create(
            model=NAME, file=("a.wav", FILES[0]), response_format="verbose_json", timestamp_granularities=["word"]
        )


def test_the_documented_commands(server: TorchServeProcess, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "speech.flac").write_bytes(encoded(HEARD[1], kind="FLAC"))

    def here(text: str) -> str:
        return text.replace("http://127.0.0.1:8080", server.inference_url).replace("/speech_recognizer", f"/{NAME}")

    lines = [line for line in commands() if line.startswith("curl") and "/predictions/speech_recognizer" in line]
    assert len(lines) == 3
    answers = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", f"{here(line)} -sS"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        answers.append(done.stdout)
    assert json.loads(answers[0])["text"] and json.loads(answers[1])["chunks"] and " --> " in answers[2]
    (code,) = [block.text for block in blocks("python") if "audio.transcriptions" in block.text]
    done = subprocess.run(
        [sys.executable, "-c", here(code)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
