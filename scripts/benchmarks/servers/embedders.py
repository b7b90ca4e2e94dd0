"""The servers of embedding.py: how each is packed, started, checked, loaded and stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from server import TorchServeProcess

from benchmarks.servers import contenders, load
from benchmarks.servers.client import Order
from build_efficientnet_mar import program, run_archiver

HERE = Path(__file__).resolve().parent
OURS, LOWER = "ours", "ours-auto-precision"
_SERVER = {"jobQueueSize": 2000, "startupTimeout": 600, "responseTimeout": 120, "maxRetryTimeoutInSec": 1}
_OURS: dict[str, Any] = {
    "minWorkers": 2, "maxWorkers": 2, "batchSize": 8, "maxBatchDelay": 1,
    "pt2": {"compile": {"enable": True, "backend": "openvino", "options": {"config": {"PERFORMANCE_HINT": "LATENCY"}}}},
    "handler": {"openvino": {"text": {"lengths": [16, 32, 48, 64, 80, 96]}, "threads": "auto"}},
}  # fmt: skip


def _eager(workers: int, batch: int, divide: bool) -> dict[str, Any]:
    return {
        "minWorkers": workers, "maxWorkers": workers, "batchSize": batch, "maxBatchDelay": 5,
        "handler": {"divide_threads": divide},
    }  # fmt: skip


CONTENDERS: Mapping[str, dict[str, Any]] = {
    "eager": _eager(1, 1, divide=False),
    "eager-batched": _eager(1, 16, divide=False),
    "eager-tuned": _eager(2, 1, divide=True),
    "eager-tuned-batched": _eager(2, 8, divide=True),
    OURS: _OURS,
    LOWER: {
        **_OURS, "handler": {"openvino": {**_OURS["handler"]["openvino"], "precision": "auto"}}
    },
}  # fmt: skip


def vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """What eager PyTorch answers, text by text: float32 ``[texts, width]``."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts]
    return torch.nn.functional.normalize(torch.cat(means))


def pack(name: str, folder: Path, work: Path) -> None:
    """Writes the archive of a contender into ``work``."""
    config = work / f"{name}.yaml"
    settings = {**_SERVER, **CONTENDERS[name]}
    if name in {OURS, LOWER}:
        config.write_text(yaml.safe_dump(settings), "utf-8")
        command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", str(folder)]
        command += ["--task", "sentence_embedder", "--model-name", name, "--config-file", str(config)]
        done = subprocess.run(
            [*command, "--export-path", str(work)], check=False, capture_output=True, text=True, cwd=work
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return
    settings["handler"] = {**settings["handler"], "folder": str(folder)}
    config.write_text(yaml.safe_dump(settings), "utf-8")
    command = [program("torch-model-archiver"), "--force", "--model-name", name, "--version", "1.0"]
    command += ["--handler", str(HERE / "plain_embedder.py"), "--config-file", str(config)]
    run_archiver([*command, "--export-path", str(work)])


def furthest(url: str, texts: list[str], expected: torch.Tensor) -> float:
    """Sends each text once; returns the smallest cosine between an answer and the expected vector."""
    with httpx.Client(trust_env=False, timeout=120) as client:
        answers = [client.post(url, json={"inputs": text}).raise_for_status().json() for text in texts]
    return float((torch.nn.functional.normalize(torch.tensor(answers)) * expected).sum(1).min())


def served(
    name: str, work: Path, requests: list[tuple[str, str]], texts: list[str], expected: torch.Tensor,
    clients: list[int], seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Starts a contender, checks its answers, measures each number of clients, and stops it."""
    workers = int(CONTENDERS[name]["minWorkers"])
    server = TorchServeProcess(
        work, models={name: f"{name}.mar"}, properties={"default_workers_per_model": str(workers)}
    )
    try:
        root = contenders.start(server, name, workers)
        url = f"{server.inference_url}/predictions/{name}"
        cosine = furthest(url, texts, expected)
        vectors = []
        order = Order(url, requests, "closed", 1, seconds, min(1.0, seconds / 5), content_type="application/json")
        load.warm_up(order, 2 * seconds / 3, clients, root)
        for level in clients:
            figures = load.measure(Order(**{**vars(order), "level": level}), root)
            vectors.append({"clients": level, "cosine": cosine, **figures})
        return vectors
    finally:
        server.stop()
