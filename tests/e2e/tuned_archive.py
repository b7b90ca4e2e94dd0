"""A small archive to tune, and what may be left behind of a tuner."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
import yaml
from torchserve_process import handler_path

from network import NETWORK

CONFIG = """
# The service of numbers.
minWorkers: 1
maxWorkers: 1
batchSize: 1      # one at a time
maxBatchDelay: 1
pt2: {compile: {enable: true, backend: openvino}}
handler:
  openvino:
    warmup: {inputs: [{shape: [4], dtype: float32}]}
"""


def make_archive(folder: Path, network: torch.nn.Module, config: str = CONFIG) -> Path:
    """Packs the network as ``net.mar``, with three requests in ``requests``."""
    torch.save(network.state_dict(), folder / "weights.pth")
    (folder / "network.py").write_text(NETWORK)
    (folder / "model-config.yaml").write_text(config)
    command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", "net", "--version", "1.0"]
    command += ["--model-file", "network.py", "--serialized-file", "weights.pth", "--handler", handler_path("tensor")]
    command += ["--config-file", "model-config.yaml", "--export-path", "."]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "requests").mkdir()
    for number in range(3):
        row = [number, 0.5, -1.0, 2.0]
        (folder / "requests" / f"{number}.json").write_text(json.dumps({"inputs": [row]}))
    return folder / "net.mar"


def config_with(**ours: object) -> str:
    """The YAML with further keys under ``handler.openvino``."""
    config = yaml.safe_load(CONFIG)
    config["handler"]["openvino"] |= ours
    return yaml.safe_dump(config)


def left_behind(folder: str) -> list[str]:
    """Command lines of servers and workers that still run and have their files in this folder."""
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [each for each in commands if re.search(rf"ts\.model_server.*{re.escape(folder)}", each)]


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """The processes whose environment has a variable with this value."""
    found = []
    for process in psutil.process_iter():
        try:
            environment: Mapping[str, str] = process.environ()
            if environment.get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
