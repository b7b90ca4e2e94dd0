"""Pictures over REST: a small pipeline from its folder to PNG, JSON and events, with bad requests between good ones."""

import base64
import concurrent.futures
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torchserve_process import TorchServeProcess

from diffusion_models import pipeline_folder

pytestmark = pytest.mark.slow

CONFIG = """
batchSize: 4
maxBatchDelay: 50
maxWorkers: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  openvino:
    image_generation: {sizes: [32x32, 48x32], max_steps: 8, default_steps: 2, max_images: 2}
    fallback: {allow: [], on_violation: refuse}
"""
NAME = "painter"


@pytest.fixture(scope="module")
def folder(server: TorchServeProcess, tmp_path_factory) -> Path:
    """The pipeline, packaged by the command, and registered."""
    place = tmp_path_factory.mktemp(NAME)
    saved = pipeline_folder("sd", place / "saved")
    config = place / "model-config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", saved, "--task", "text-to-image"]
    command += ["--model-name", NAME, "--config-file", config, "--export-path", server.model_store]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "task: image_generator" in done.stdout, done.stdout + done.stderr
    answer = server.register(f"{NAME}.mar", NAME)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(60)}"
    server.wait_ready(NAME)
    return saved


def post(server: TorchServeProcess, body: Any, path: str = "") -> httpx.Response:
    return httpx.post(f"{server.inference_url}/predictions/{NAME}{path}", json=body, timeout=120)


def pixels(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"), int)


def test_pictures_and_refusals_of_one_batch(server: TorchServeProcess, folder: Path) -> None:
    import diffusers

    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    good = {"prompt": "a cat", "seed": 7, "steps": 4, "size": "48x32"}
    bodies = [good, {"prompt": "a", "steps": 99}, good, {"prompt": "a", "size": "64x64"}, good, {"steps": 1}, good]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(server, body), bodies))
    assert [each.status_code for each in answers] == [200, 400, 200, 400, 200, 400, 200]
    assert "the most is 8" in answers[1].json()["message"] and "32x32, 48x32" in answers[3].json()["message"]
    expected = pipe(
        "a cat", num_inference_steps=4, width=48, height=32, generator=torch.Generator().manual_seed(7)
    ).images[0]
    for answer in answers[::2]:
        assert answer.headers["content-type"] == "image/png" and answer.content == answers[0].content
    assert np.abs(pixels(answers[0].content) - np.array(expected, int)).max() <= 1
    report = server.describe(NAME)
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] and report["verify"]["passed"]
    assert set(report["config"]["components"]) >= {"text_encoder", "unet 32x32", "vae.decode 48x32"}
    assert report["serving"]["compiles_after_ready"] == 0


def test_openais_form(server: TorchServeProcess, folder: Path) -> None:
    body = {"model": NAME, "prompt": "a cat", "n": 2, "size": "32x32", "seed": 7}
    answer = post(server, body, "/1.0/v1/images/generations")
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["data"]
    alone = post(server, {"prompt": "a cat", "seed": 8})
    assert first["seed"] == 7
    assert np.array_equal(pixels(base64.b64decode(second["b64_json"])), pixels(alone.content))
    refused = post(server, {**body, "response_format": "url"}, "/1.0/v1/images/generations")
    assert refused.status_code == 400 and "response_format" in refused.json()["error"]["message"]
    assert post(server, body, "/1.0/v1/images/edits").status_code == 404


def test_a_stream(server: TorchServeProcess, folder: Path) -> None:
    url = f"{server.inference_url}/predictions/{NAME}"
    body = {"prompt": "a cat", "seed": 7, "steps": 3, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [each.get("step") for each in told] == [1, 2, 3, None] and text.endswith("data: [DONE]\n\n")
    alone = post(server, {"prompt": "a cat", "seed": 7, "steps": 3})
    assert np.array_equal(pixels(base64.b64decode(told[-1]["b64_json"])), pixels(alone.content))


def test_streams_and_pictures_share_a_batch(server: TorchServeProcess, folder: Path) -> None:
    bodies = [{"prompt": "a cat", "seed": 7, "steps": 4, "stream": place % 2 == 0} for place in range(8)]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(server, body), bodies))
    assert [each.status_code for each in answers] == [200] * 8
    pictures = [each.content for each in answers[1::2]]
    assert all(each == pictures[0] for each in pictures)
    for each in answers[::2]:
        told = [json.loads(line[6:]) for line in each.text.splitlines() if line.startswith("data: {")]
        assert [fact.get("step") for fact in told] == [1, 2, 3, 4, None]
        assert np.array_equal(pixels(base64.b64decode(told[-1]["b64_json"])), pixels(pictures[0]))


def test_a_picture_that_holds_nan_is_an_error(server: TorchServeProcess, folder: Path) -> None:
    answer = post(server, {"prompt": "a", "guidance": 3e38, "seed": 0})
    assert answer.status_code == 500 and "NaN" in answer.json()["message"]
    assert post(server, {"prompt": "a"}).status_code == 200


def test_openais_own_client(server: TorchServeProcess, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.inference_url}/predictions/{NAME}/1.0/v1", api_key="none", max_retries=0)
    answer = client.images.generate(model=NAME, prompt="a cat", n=2, size="32x32", extra_body={"seed": 7})
    assert [each.model_extra for each in answer.data] == [{"seed": 7}, {"seed": 8}]
    alone = post(server, {"prompt": "a cat", "seed": 7})
    assert np.array_equal(pixels(base64.b64decode(answer.data[0].b64_json)), pixels(alone.content))
    with pytest.raises(openai.BadRequestError, match="this model makes 32x32, 48x32"):
        client.images.generate(model=NAME, prompt="a cat", size="1024x1024")
