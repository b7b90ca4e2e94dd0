"""Hostile requests beside valid ones on a real TorchServe: a seeded sample of scripts/fuzz_requests.py."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from torchserve_process import ROOT, TorchServeProcess

from request_fuzzing.campaign import Campaign
from request_fuzzing.hosts import HOSTS, Server, TorchServe

_LIMIT_SECONDS, _PEAK_MB = 30.0, 1500.0


@pytest.mark.quick(subject=["tensor_growing"])
@pytest.mark.parametrize(
    ("subject", "requests"),
    [
        ("tensor", 90),
        ("tensor_growing", 42),
        ("image_classifier", 60),
        ("text_classifier", 60),
        ("image_segmenter", 60),
    ],
)
def test_hostile_requests_get_4xx_and_their_neighbors_answers(
    subject: str, requests: int, server: TorchServeProcess
) -> None:
    @contextmanager
    def registered(archive: Path) -> Iterator[Server]:
        shutil.copy(archive, server.model_store)
        answer = server.register(archive.name, archive.stem)
        assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(100)}"
        try:
            server.wait_ready(archive.stem)
            yield TorchServe(server, archive.stem)
        finally:
            server.http.delete(f"{server.management_url}/models/{archive.stem}", timeout=60)

    log = io.StringIO()
    campaign = Campaign(1, "torchserve", registered, _LIMIT_SECONDS, _PEAK_MB, 0.0, Console(file=log, width=200))
    campaign.run([subject], 0, requests)
    assert not campaign.failures, log.getvalue()
    assert campaign.requests == requests and campaign.statuses["400"] > 0


def test_hostile_requests_to_serve() -> None:
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    log = io.StringIO()
    campaign = Campaign(2, "serve", HOSTS["serve"], _LIMIT_SECONDS, _PEAK_MB, 0.0, Console(file=log, width=200))
    campaign.run(["tensor"], 0, 60)
    assert not campaign.failures, log.getvalue()
    assert campaign.requests == 60 and campaign.statuses["400"] > 0


def test_the_command_says_what_is_wrong_with_its_options() -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "fuzz_requests.py", *options]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    assert "image_segmenter" in run("--task", "nothing").stderr
    assert "kserve" in run("--host", "nothing").stderr
    assert "fuzz_requests.py --seed 1 --requests 300" in run("--help").stdout
    done = run("--requests", "0", "--task", "tensor", "--json", "--seconds", "0.001")
    assert done.returncode == 0 and json.loads(done.stdout)["failures"] == []
