"""Observes and pins what OpenVINO's own backend does, so that an upgrade that changes it fails here."""

import json
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchserve_openvino.doctor.bisecting import stock_worker
from torchserve_openvino.doctor.bisecting.stock import (
    StockRun,
    StockVerdict,
    given_options,
    run_worker,
    what_upstream_does,
)
from torchserve_openvino.doctor.target import SampleCall, TargetSpec

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


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets "OpenVINO's backend" run the model itself, so that this process does not import it."""
    monkeypatch.setattr(stock_worker, "_watch", lambda: nullcontext(stock_worker._Watched()))
    monkeypatch.setattr(torch, "compile", lambda model, **arguments: model)


@pytest.mark.usefixtures("unwatched")
def test_values_that_eager_refuses_are_no_fault_of_openvino() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0] > 1:
                raise ValueError("the first value must be small")
            return x * 2

    run = StockRun(**stock_worker.run_stock(Picky(), SampleCall((torch.tensor([0.0, 9.0]),), {}), None))
    assert (run.outcome, run.error, run.values_compared) == ("eager", "", 1)
    assert (run.max_abs, run.max_abs_other_input) == (0.0, None)
    assert "difference from eager: 0 at most" in run.text()


@pytest.mark.usefixtures("unwatched")
def test_each_run_of_stock_starts_from_the_same_inputs_and_state() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x.add_(self.calls) + torch.rand(2)

    x = torch.tensor([1.0, 2.0])
    run = StockRun(**stock_worker.run_stock(Changing(), SampleCall((x,), {}), None))
    assert (run.max_abs, run.max_abs_other_input, run.values_compared) == (0.0, 0.0, 2)
    assert not run.first_answer_overwritten and x.tolist() == [1.0, 2.0]


@pytest.mark.usefixtures("unwatched")
def test_an_answer_that_the_next_call_overwrites_is_seen() -> None:
    class Shares(nn.Module):
        memory = torch.zeros(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.memory.copy_(x)

    # The memory belongs to the function alone, as that of an infer request.
    shares = Shares()
    run = stock_worker.run_stock(lambda x: shares(x), SampleCall((torch.tensor([1.0, 2.0]),), {}), None)
    assert run["first_answer_overwritten"]


def test_an_interrupt_ends_the_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = tmp_path / "alive"
    code = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).write_text(str(time.time())); time.sleep(0.05)"
    )

    def interrupted(process: Any, timeout: float | None = None) -> int:
        if timeout == 60:
            while not alive.exists():
                time.sleep(0.05)
            raise KeyboardInterrupt
        return int(wait(process, timeout))

    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_worker([sys.executable, "-c", code], tmp_path / "answer", timeout=60)
    time.sleep(0.3)
    assert time.time() - alive.stat().st_mtime > 0.2
