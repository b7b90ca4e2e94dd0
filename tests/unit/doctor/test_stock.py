"""Observes and pins what OpenVINO's own backend does, so that an upgrade that changes it fails here."""

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchserve_openvino.doctor.bisecting.stock import (
    StockRun,
    StockVerdict,
    given_options,
    run_worker,
    what_upstream_does,
)
from torchserve_openvino.doctor.target import TargetSpec

SCRIPT = Path(__file__).with_name("stock_process.py")


@pytest.fixture
def stock(tmp_path: Path) -> Any:
    def run(model: str, options: dict[str, Any]) -> StockRun:
        answer = tmp_path / "answer.json"
        return run_worker([sys.executable, str(SCRIPT), model, json.dumps(options), str(answer)], answer, timeout=120)

    return run


@pytest.mark.slow
def test_an_operator_that_it_lacks_is_named(stock: Any) -> None:
    run = stock("digamma", {"aot_autograd": True})
    assert (run.outcome, run.partitions, run.unsupported) == ("partial", 2, {"aten.digamma.default": 1})
    assert run.ops_offloaded == run.ops_total - 1
    assert "aten.digamma.default (1)" in run.text()


@pytest.mark.slow
def test_silent_eager_is_seen_with_its_reason(stock: Any) -> None:
    run = stock("conv", {"aot_autograd": True, "device": "AUTO"})
    assert (run.outcome, run.ops_offloaded, run.partitions) == ("eager", 0, 0)
    assert "AUTO is not in the list" in run.failures[0] and run.failures[0] in run.text()


def test_a_process_that_dies_is_no_error_of_ours(tmp_path: Path) -> None:
    code = "import os, sys; print('last words', flush=True); os.abort()"
    run = run_worker([sys.executable, "-c", code], tmp_path / "answer", timeout=60)
    assert run.outcome == "crashed" and "Aborted" in run.error and "last words" in run.text()
    run = run_worker([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "answer", timeout=60)
    assert run.error == "exit code 3: no output"


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).write_text(str(time.time())); time.sleep(0.05)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    run = run_worker([sys.executable, "-c", code], tmp_path / "answer", timeout=2)
    assert run.outcome == "timed_out" and "2 s" in run.text()
    time.sleep(0.3)
    assert time.time() - alive.stat().st_mtime > 0.2


def test_options_are_handed_on_as_they_are_written(tmp_path: Path) -> None:
    model, config = tmp_path / "model.py", tmp_path / "model-config.yaml"
    config.write_text("pt2: {compile: {dynamic: false, options: {device: cpu, disabled_ops: aten::relu}}}\n")
    written = ({"device": "cpu", "disabled_ops": "aten::relu"}, False)
    assert given_options(model, config) == written
    archive = tmp_path / "model.mar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"configFile": "here.yaml"}}))
        file.writestr("here.yaml", config.read_text())
    assert given_options(archive, None) == written
    config.write_text("pt2: openvino\n")
    assert given_options(archive, config) == given_options(model, None) == (None, None)


def test_the_verdict_is_json_and_text() -> None:
    verdict = StockVerdict(
        {"as given": StockRun("eager", failures=["why"]), "aot_autograd: true": StockRun("openvino")}
    )
    assert json.loads(json.dumps(verdict.to_dict()))["as given"]["failures"] == ["why"]
    assert verdict.text().splitlines()[:2] == [
        'torch.compile(backend="openvino"), as given: silently runs eager PyTorch; nothing runs on OpenVINO',
        "  why",
    ]


@pytest.mark.slow
def test_a_conv_net_is_refused_or_runs_eager_and_with_aot_autograd_overwrites_its_answers(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "import torch\nfrom torch import nn\nprint('loading')\n"
        "def model():\n    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)\n"
        "    return nn.Sequential(*layers).eval(), (torch.randn(2, 3, 8, 8),)\n"
    )
    verdict = what_upstream_does(TargetSpec(path=str(model), config=None, inputs=(), mappings=()), timeout=120)
    run = verdict.runs["as given"]
    # torch 2.13 and OpenVINO 2026.4: AssertionError, sources must not be empty for symbol.
    assert run.outcome in {"refused", "eager"} and run.ops_offloaded == 0
    assert run.outcome != "refused" or ("AssertionError" in run.error and "each request" in run.text())
    run = verdict.runs["aot_autograd: true"]
    assert (run.outcome, run.partitions, run.error, run.failures) == ("openvino", 1, "", []), verdict.text()
    assert run.ops_total == run.ops_offloaded > 3
    # By default it infers in bf16 on CPUs that support it.
    assert run.max_abs < 2e-2 and run.max_abs_other_input < 2e-2
    assert run.first_call_seconds > run.later_call_seconds > 0
    # share_outputs: the result is a view of the infer request's memory.
    assert run.first_answer_overwritten and "overwrote the answer of the first" in run.text()
