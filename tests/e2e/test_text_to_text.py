"""A T5 over REST: its task is guessed, compiled graphs generate what eager PyTorch does, and a second start is warm."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from torchserve_process import ROOT, TorchServeProcess

from chat_models import PROMPTS, eager_tokens, text_of, text_to_text_model

NAME = "t5"
MOST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_to_text_model(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def served(server: TorchServeProcess, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = yaml.safe_load((ROOT / "model-config" / "text-generation.yaml").read_text(encoding="utf-8"))
    place = tmp_path_factory.mktemp("archive") / "model-config.yaml"
    config["handler"]["openvino"]["generate"] |= {"max_length": 96, "max_tokens": 32, "proof_tokens": 6}
    place.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--precompile"]
    command += ["--model-name", NAME, "--export-path", server.model_store, "--config-file", place]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "task: text_generator" in done.stdout, done.stdout + done.stderr
    answer = server.register(f"{NAME}.mar", NAME)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(80)}"
    server.wait_ready(NAME)
    yield NAME
    httpx.delete(f"{server.management_url}/models/{NAME}", timeout=60)


@pytest.mark.slow
def test_prompts_streams_and_openai(served: str, server: TorchServeProcess, folder: Path) -> None:
    url = f"{server.inference_url}/predictions/{served}"
    wanted = [eager_tokens(folder, prompt, MOST) for prompt in PROMPTS[:3]]
    for prompt, tokens in zip(PROMPTS, wanted, strict=False):
        found = httpx.post(url, json={"prompt": prompt, "max_tokens": MOST}, timeout=120).json()
        assert found["text"] == text_of(tokens) and found["generated_tokens"] == len(tokens)
    with httpx.stream("POST", url, json={"prompt": PROMPTS[1], "max_tokens": MOST, "stream": True}, timeout=120) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["text"] for line in lines[:-1]) == text_of(wanted[1])
    client = openai.OpenAI(
        base_url=f"{url}/1.0/v1", api_key="none", max_retries=0, timeout=120, http_client=httpx.Client(trust_env=False)
    )
    whole = client.completions.create(model=served, prompt=PROMPTS[2], max_tokens=MOST, temperature=0, logprobs=3)
    assert whole.choices[0].text == text_of(wanted[2]) and whole.usage is not None
    assert whole.usage.completion_tokens == len(wanted[2])
    # Two tokens may have the same text.
    assert whole.choices[0].logprobs is not None and 1 <= len(whole.choices[0].logprobs.top_logprobs[0]) <= 3
    with pytest.raises(openai.BadRequestError, match="template"):
        client.chat.completions.create(model=served, messages=[{"role": "user", "content": "Hello"}])
    assert httpx.post(url, json={"prompt": "x " * 200}, timeout=120).status_code == 400
    report = server.describe(served)
    generate = report["generate"]
    assert generate["engine"] == "compile" and "has an encoder" in generate["why"]
    assert generate["passed"] and generate["tokens_compared"] == generate["tokens_equal"] > 0
    assert report["summary"]["coverage"] == 1 and report["summary"]["fallbacks"] == 0
    assert report["serving"]["compiles_after_ready"] == 0
    assert report["cache"]["traces"] == report["cache"]["compiles"] == 0, "the archive holds the graphs"
