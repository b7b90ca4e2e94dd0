"""Starts of workers that generate text, in one TorchServe: this package's from a warm cache, GenAI in a plain handler.

A start is the time from TorchServe's order for a worker to the worker's first token. Both read the same exported model.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from server import TorchServeProcess

from benchmarks import output
from benchmarks.generation import MODELS, random_model
from benchmarks.servers import generators
from benchmarks.startups.generation import figures, save_export

_BODY = {"prompt": "abc", "max_tokens": 1}


def worker_starts(work: Path, turns: int) -> dict[str, Any]:
    """Measures both in turns.

    Args:
        work: An empty folder.
        turns: How often each starts.

    Returns:
        Median seconds of each until its first token, their ratio, and all figures.
    """
    folder, store = work / "model", work / "store"
    store.mkdir()
    generators.save(random_model(MODELS["grouped"], 2048), folder)
    generators.pack(folder, "ours", store, work / "cache")
    _pack_plain(work, folder, store)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    with TorchServeProcess(store, models={name: f"{name}.mar" for name in seconds}) as server:
        for name in seconds:
            server.wait_ready(name, timeout=900)
            _scale(server, name, 0)
        for turn in range(turns + 1):
            output.progress.print(f"worker_start: turn {turn} of {turns}")
            for name, times in seconds.items():
                times.append(_start(server, name))
                _scale(server, name, 0)
    # The first start of each reads files that are not in memory yet.
    return figures(seconds, skipped=1)


def _pack_plain(work: Path, folder: Path, store: Path) -> None:
    from transformers import AutoModelForCausalLM

    exported = work / "exported"
    save_export(AutoModelForCausalLM.from_pretrained(folder), exported)
    settings = {
        "minWorkers": 1, "maxWorkers": 1, "responseTimeout": 120, "startupTimeout": 120,
        "handler": {"tokenizer": str(folder), "exported": str(exported)},
    }  # fmt: skip
    config = work / "bare.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command: list[Any] = [
        "torch-model-archiver", "--model-name", "bare", "--version", "1.0", "--handler",
        Path(generators.__file__).with_name("plain_generator.py"), "--config-file", config, "--export-path", store,
    ]  # fmt: skip
    subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True)


def _scale(server: TorchServeProcess, name: str, workers: int) -> None:
    order = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
    httpx.put(f"{server.management_url}/models/{name}", params=order, timeout=300).raise_for_status()


def _start(server: TorchServeProcess, name: str) -> float:
    began = time.perf_counter()
    _scale(server, name, 1)
    httpx.post(f"{server.inference_url}/predictions/{name}", json=_BODY, timeout=300).raise_for_status()
    return time.perf_counter() - began
