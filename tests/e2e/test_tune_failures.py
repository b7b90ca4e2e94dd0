"""What goes wrong while the tuner runs, with real servers: each case is said, and nothing is left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tuned_archive import config_with, left_behind, make_archive, processes_with

from torchserve_openvino.bench.bodies import read_folder
from torchserve_openvino.bench.ports import free_ports
from torchserve_openvino.bench.torchserve_process import Ports, TorchServeError, TorchServeProcess
from torchserve_openvino.config.openvino.precisions import unsupported
from torchserve_openvino.tune.archives import Variants
from torchserve_openvino.tune.first_stage import FirstStage
from torchserve_openvino.tune.profile import Process, WorkerFailedError
from torchserve_openvino.tune.search import RejectedError
from torchserve_openvino.tune.session import Result, Session
from torchserve_openvino.tune.settings import Settings
from torchserve_openvino.tune.trial import Bench, environment_for

# One way to compute and one configuration: the present one.
ALONE = {"cores": 1, "precisions": ["f32"], "batch_sizes": [1], "delays": [1], "options": {}, "window": 0.5}
ENOUGH = 10**15


@pytest.fixture
def scratch() -> Iterator[Path]:
    # Short: the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-tune-") as folder:
        yield Path(folder)
        assert not left_behind(Path(folder).name)


def tuned(
    folder: Path, scratch: Path, tell: Callable[[str], None] = lambda text: None, **fields: object
) -> tuple[Result, list[str]]:
    """Runs a session; returns its result and its lines."""
    lines: list[str] = []

    def told(text: str) -> None:
        lines.append(text)
        tell(text)

    variants = Variants(folder / "net.mar", scratch)
    settings = Settings(**{**ALONE, **fields})
    session = Session(
        folder / "net.mar", read_folder(folder / "requests"), settings, folder / "out" / "trials.json", told
    )
    return session.run(variants, scratch), lines


class Killer:
    """Kills a server, or the worker of one, in the first windows that are measured."""

    def __init__(self, scratch: Path, kills: int, worker: bool) -> None:
        self._scratch, self.left, self._worker = scratch.name, kills, worker

    def __call__(self, text: str) -> None:
        # A window was measured, and more of them follow.
        if self.left and re.match(r"[\d.]+ requests/s:", text):
            self.left -= 1
            name = "model_service_worker" if self._worker else "ts.model_server"
            (leader,) = [
                process
                for process in psutil.Process().children()
                if any(self._scratch in word for word in process.cmdline())
            ]
            (victim, *_) = [
                each for each in (leader, *leader.children(recursive=True)) if name in " ".join(each.cmdline())
            ]
            victim.kill() if self._worker else os.killpg(leader.pid, signal.SIGKILL)
            psutil.wait_procs([victim], timeout=10)
            # TorchServe notices the death of a worker a little later.
            time.sleep(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("worker", [False, True], ids=["server", "worker"])
def test_a_server_that_is_killed_in_mid_trial_is_tried_once_more(
    tmp_path: Path, scratch: Path, network: torch.nn.Module, worker: bool
) -> None:
    make_archive(tmp_path, network)
    result, _ = tuned(tmp_path, scratch, Killer(scratch, 1, worker))
    assert result.choice.best is not None and result.choice.best.score > 0
    assert not left_behind(scratch.name)


@pytest.mark.slow
def test_a_server_that_is_killed_each_time_is_out(tmp_path: Path, scratch: Path, network: torch.nn.Module) -> None:
    make_archive(tmp_path, network)
    result, _ = tuned(tmp_path, scratch, Killer(scratch, 2, False))
    assert result.choice.best is None
    assert "its server died twice: TorchServe ended in mid-trial" in result.choice.reason


@pytest.mark.slow
def test_a_limit_that_nothing_holds_is_named_with_the_nearest(
    tmp_path: Path, scratch: Path, network: torch.nn.Module
) -> None:
    make_archive(tmp_path, network)
    result, _ = tuned(tmp_path, scratch, p99="0.01ms")
    assert result.choice.best is None and result.claim is None
    assert re.search(
        r"within the limits; the nearest is 1 worker x 1 thread.*: no rate at which the limits hold: at [\d.]+ "
        r"requests/s the p99 was \d+ ms",
        result.choice.reason,
    ), result.choice.reason


@pytest.mark.slow
def test_an_archive_that_is_refused_by_its_worker_is_said_with_the_reason(
    tmp_path: Path, scratch: Path, network: torch.nn.Module
) -> None:
    make_archive(tmp_path, network, config_with(fallback={"min_coverage": 1.0, "on_violation": "refuse"}).replace(
        "backend: openvino", "backend: openvino\n    options: {disabled_ops: [aten.relu], min_partition_us: 0}"
    ))  # fmt: skip
    result, lines = tuned(tmp_path, scratch)
    assert result.choice.best is None
    assert re.search(r"did not become READY: .*min_coverage", result.choice.reason), result.choice.reason
    assert all("min_coverage" in reason for reason in result.profile.rejected.values()), lines


def test_a_port_in_use_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = Ports(other.getsockname()[1], *free_ports(4))
        server = TorchServeProcess(tmp_path, ports=ports)
        with pytest.raises(TorchServeError, match="TorchServe exited with"), server:
            pass
    assert not server.alive and not server.home.exists()


def test_a_candidate_for_which_memory_is_too_little_is_out(
    tmp_path: Path, scratch: Path, network: torch.nn.Module
) -> None:
    archive = make_archive(tmp_path, network)
    bodies = read_folder(tmp_path / "requests")
    with pytest.raises(WorkerFailedError, match=r"too little memory: \d+ MB were left"):
        Process(archive, bodies, environment_for(scratch / "cache"), ENOUGH)
    bench = Bench(tmp_path, "net", bodies, [], Settings(), environment_for(scratch), lambda text: None, ENOUGH)
    with pytest.raises(RejectedError, match=r"too little memory: \d+ MB were left"):
        bench.run(archive, "f32", 0.0, 1)


def test_traps_are_rejected_before_any_server(tmp_path: Path, scratch: Path, network: torch.nn.Module) -> None:
    # A difference of large numbers: in bf16 nothing of it is left.
    with torch.no_grad():
        network = type(network)()
        network.first.weight[:] = torch.tensor([1e4, -1e4, 0, 0])
    make_archive(tmp_path, network)
    (tmp_path / "requests" / "0.json").write_text(json.dumps({"inputs": [[1.001, 1.0, 0.0, 0.0]]}))
    precisions = ["f32", *(["bf16"] if unsupported("bf16", "CPU") is None else [])]
    options = {"pt2.compile.options.disabled_ops": [["aten.relu"]], "pt2.compile.options.min_partition_us": [0]}
    settings = Settings(**{**ALONE, "precisions": precisions, "options": options})
    stage = FirstStage(
        Variants(tmp_path / "net.mar", scratch), read_folder(tmp_path / "requests"), settings, 1,
        environment_for(scratch / "cache"), lambda text: None,
    )  # fmt: skip
    known = stage.run()
    fallback = known.options['pt2.compile.options.disabled_ops ["aten.relu"]']
    assert "it runs outside OpenVINO what the present configuration does not: disabled_op aten.relu" in fallback
    assert {engine.precision for engine in known.times} == {"f32"}
    if "bf16" in precisions:
        reasons = [reason for engine, reason in known.rejected.items() if engine.precision == "bf16"]
        assert reasons and all(re.search("differ|wrong answer", reason) for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("until", "code"), [("loading f32", 1), ("once more, at", 0)], ids=["first stage", "servers"])
def test_ctrl_c_leaves_nothing_but_what_is_known(
    tmp_path: Path, network: torch.nn.Module, until: str, code: int
) -> None:
    make_archive(tmp_path, network)
    (tmp_path / "tune.yaml").write_text(json.dumps({**ALONE, "window": 1.0}))
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:
        command = [sys.executable, "-m", "torchserve_openvino.cli", "tune", "net.mar", "--requests", "requests"]
        process = subprocess.Popen(
            [*command, "--settings", "tune.yaml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, env={**os.environ, "TMPDIR": temporary, "TUNED_BY": temporary},
        )  # fmt: skip
        assert process.stderr is not None
        while until not in (line := process.stderr.readline()):
            assert line, "it ended too early"
        # As a terminal does: all processes of the group get it.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert "Traceback" not in err
        assert not processes_with("TUNED_BY", temporary)
        assert list(Path(temporary).iterdir()) == []
    written = tmp_path / "net-tuned"
    if code:
        assert "nothing is known yet" in err and not (written / "tune.json").exists()
        return
    assert json.loads((written / "tune.json").read_text())["interrupted"] is True
    assert (written / "model-config.yaml").exists(), out
    shutil.rmtree(written)
