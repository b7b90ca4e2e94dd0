"""One TorchServe that the tests of this folder share, since a start takes seconds; they register models on it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchserve_process import ROOT, TorchServeProcess, torchserve

from network import make_network

SERVER = pytest.StashKey[TorchServeProcess]()


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def server(request) -> Iterator[TorchServeProcess]:
    # As the docs ask for where text is generated; the other ways to serve don't use the classes that are patched.
    with torchserve(patched=True) as running:
        request.config.stash[SERVER] = running
        yield running
        del request.config.stash[SERVER]


@pytest.fixture(scope="session")
def efficientnet(server) -> str:
    """The quickstart's model, packed by its script and registered as `efficientnet-lite0`."""
    name = "efficientnet-lite0"
    script = ROOT / "scripts" / "build_efficientnet_mar.py"
    command = [sys.executable, script, "--export-path", server.model_store, "--model-name", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = server.register(f"{name}.mar", name)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(100)}"
    server.wait_ready(name)
    return name


@pytest.fixture(scope="session")
def network() -> torch.nn.Module:
    """The small network in eager PyTorch, with fixed weights."""
    return make_network()


@pytest.fixture(scope="session")
def weights(network, tmp_path_factory) -> Path:
    """The small network's weights in a file."""
    path = tmp_path_factory.mktemp("weights") / "network.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the end of the server's log to the report of a failed test."""
    report = yield
    server = item.config.stash.get(SERVER, None)
    if report.failed and server is not None:
        report.sections.append(("end of TorchServe's log", server.log_tail()))
    return report
