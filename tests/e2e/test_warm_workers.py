"""Warm starts in a real TorchServe: workers that share a cache, archives that carry one, weights that change."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torchserve_process import TorchServeProcess, handler_path, loaded
from typer.testing import CliRunner

from encoder import ENCODER, encoder
from torchserve_openvino.cli import app

# Explicit, so that the compiled models do not depend on this CPU.
F32 = "config: {INFERENCE_PRECISION_HINT: f32}"
CONFIG = """
minWorkers: {workers}
maxWorkers: {workers}
batchSize: 2
maxBatchDelay: 20
startupTimeout: 120
pt2: {{compile: {{enable: true, backend: openvino, options: {options}}}}}
handler:
  openvino:
    warmup: {{inputs: [{{name: ids, shape: [4], dtype: int64, low: 0, high: 50}}]}}
"""
BODY = b'{"inputs": {"ids": [[1, 2, 3, 4]]}}'


def weights_at(path: Path, seed: int) -> torch.nn.Module:
    model = encoder()
    torch.manual_seed(seed)
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})
    torch.save(model.state_dict(), path)
    return model


def reports(server: TorchServeProcess, name: str, count: int) -> dict[int, dict[str, Any]]:
    """The report of each worker, by pid; each request reaches one of them."""
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        report = server.describe(name)
        found[report["pid"]] = report
    assert len(found) == count
    return found


def right(server: TorchServeProcess, name: str, model: torch.nn.Module) -> None:
    answer = server.predict(name, BODY, "application/json")
    assert answer.status_code == 200, answer.text
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3, 4]]))["logits"]
    torch.testing.assert_close(torch.tensor(answer.json()["logits"]), expected, rtol=1e-3, atol=1e-3)


def test_two_workers_compile_once_and_new_weights_are_never_served_stale(
    server: TorchServeProcess, tmp_path: Path
) -> None:
    model = weights_at(tmp_path / "weights.pth", seed=1)
    config = CONFIG.format(workers=2, options=f"{{model_caching: true, cache_dir: {tmp_path / 'cache'}, {F32}}}")
    arguments: dict[str, Any] = {
        "handler": handler_path("tensor"),
        "config": config,
        "model_file": ENCODER,
        "serialized_file": tmp_path / "weights.pth",
    }
    with loaded(server, "shared", **arguments):
        right(server, "shared", model)
        caches = [report["cache"] for report in reports(server, "shared", 2).values()]
        # Two batch sizes: the worker that gets a signature's lock traces it, the other one loads it from the cache.
        assert sum(cache["traces"] for cache in caches) == 2 and sum(cache["compiles"] for cache in caches) == 2
        assert sum(cache["calls"]["hits"] for cache in caches) == 2
    with loaded(server, "shared", **arguments):
        right(server, "shared", model)
        for report in reports(server, "shared", 2).values():
            assert report["cache"]["status"] == "hit" and report["verify"]["passed"]
            assert (report["cache"]["traces"], report["cache"]["compiles"]) == (0, 0)
            assert report["summary"]["coverage"] == 1.0 and report["summary"]["fallbacks"] == 0
            assert report["graphs"][0]["partitions"][0]["execution_devices"] == ["CPU"]
            # Each worker's report lists both.
            workers = report["workers"]
            assert len({worker["pid"] for worker in workers}) == 2 and all(worker["verified"] for worker in workers)
    # Retrained weights, with the same name, shapes and cache.
    other = weights_at(tmp_path / "weights.pth", seed=2)
    with loaded(server, "shared", **arguments):
        right(server, "shared", other)
        nearest = [report["cache"]["nearest"] for report in reports(server, "shared", 2).values()]
        assert {"weights"} in [set(differs) for differs in nearest]


@pytest.mark.slow
def test_a_worker_that_is_added_while_serving_shares_the_cores(server: TorchServeProcess, tmp_path: Path) -> None:
    model = weights_at(tmp_path / "weights.pth", seed=4)
    silent = CONFIG.replace("minWorkers: {workers}\nmaxWorkers: {workers}\n", "").format(options=f"{{{F32}}}")
    arguments: dict[str, Any] = {"model_file": ENCODER, "serialized_file": tmp_path / "weights.pth"}
    with loaded(server, "grown", handler=handler_path("tensor"), config=silent, **arguments):
        first = server.describe("grown")
        assert first["config"]["threads"]["workers"] == len(first["workers"]) == 1
        url = f"{server.management_url}/models/grown?min_worker=2&synchronous=true"
        assert server.http.put(url).status_code == 200
        found = reports(server, "grown", 2)
        (added,) = (report for pid, report in found.items() if pid != first["pid"])
        assert added["config"]["threads"]["workers"] == 2 and len(added["workers"]) == 2
        right(server, "grown", model)


@pytest.mark.slow
def test_a_packaged_archive_starts_every_worker_warm(server: TorchServeProcess, tmp_path: Path) -> None:
    model = weights_at(tmp_path / "weights.pth", seed=3)
    (tmp_path / "model.py").write_text(ENCODER)
    (tmp_path / "model-config.yaml").write_text(CONFIG.format(workers=2, options=f"{{{F32}}}"))
    arguments = ["package", "--model-name", "packed", "--model-file", tmp_path / "model.py", "--handler", "tensor"]
    arguments += ["--serialized-file", tmp_path / "weights.pth", "--config-file", tmp_path / "model-config.yaml"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--export-path", str(server.model_store), "--precompile"])
    assert done.exit_code == 0, done.output
    assert server.register("packed.mar", "packed").status_code == 200
    try:
        server.wait_ready("packed")
        right(server, "packed", model)
        for report in reports(server, "packed", 2).values():
            assert report["cache"]["status"] == "hit" and report["cache"]["packaged"]
            assert (report["cache"]["traces"], report["cache"]["compiles"]) == (0, 0)
            assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0
    finally:
        server.http.delete(f"{server.management_url}/models/packed")
