"""Archives in int8 of each task of Hugging Face models: they load and answer without their weights in f32."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from every_task import SERVED, bodies, saved
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.serving.torchserve.archive_loader import load_without_server
from torchserve_openvino.serving.torchserve.base import worker_of

pytest.importorskip("nncf")
pytest.importorskip("torchao")

pytestmark = pytest.mark.slow


def packaged(task: str, folder: Path, **quantize: Any) -> "subprocess.CompletedProcess[str]":
    """Packages a small model of the task in int8."""
    model = saved(task, folder / "saved")
    (folder / "requests").mkdir()
    for number, body in enumerate(bodies(task)):
        name = f"{number}.wav" if isinstance(body, bytes) else f"{number}.json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        (folder / "requests" / name).write_bytes(content)
    quantize = {"method": "int8_weights", "evaluation": {"data": "requests"}, "max_drop": 1.0, **quantize}
    # As few lengths as possible.
    section = {"text": {"lengths": [128]}, "audio": {"lengths": [2], "max_seconds": 2}, "quantize": quantize}
    # Scores of random weights are large, and integers round alike only in exact arithmetic.
    section["verify"] = {"max_abs": 0.05}
    config = {"batchSize": 1, "handler": {"openvino": section}}
    config["pt2"] = {"compile": {"enable": True, "backend": "openvino"}}
    (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", str(model), "--task", task]
    command += ["--model-name", "net", "--config-file", "model-config.yaml", "--export-path", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


# What is refused while it is packaged, with the reason.
REFUSED = {"zero_shot_image_classifier": "quantize.keep_f32: true", "fill_mask": "torch.export can't express the model"}


@pytest.mark.parametrize("task", sorted(set(SERVED) - set(REFUSED)))
def test_each_task_answers_in_int8(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = packaged(task, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "unpacked").mkdir()
    extract(tmp_path / "net.mar", tmp_path / "unpacked")
    monkeypatch.setattr(sys, "path", list(sys.path))
    handler = load_without_server(tmp_path / "unpacked")
    for body in bodies(task):
        (answer,) = worker_of(handler).run_sample(body if isinstance(body, bytes) else json.dumps(body).encode())
        answer = json.loads(answer) if isinstance(answer, (bytes, str)) else answer
        assert not isinstance(answer, dict) or "code" not in answer, answer
    assert handler.describe_handle()["config"]["quantized"]["method"] == "int8_weights"


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_what_cannot_be_quantized_is_said(task: str, tmp_path: Path) -> None:
    done = packaged(task, tmp_path)
    assert done.returncode == 1 and REFUSED[task] in " ".join(done.stderr.split())
