"""Every Hugging Face task over REST, at batch size 4 with mixed lengths and sizes, against the same handler in eager.

That the handlers' eager answers are those of transformers' own pipelines is tested in tests/unit/tasks.
"""

import concurrent.futures
import importlib
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from torchserve_process import ROOT, TorchServeProcess, handler_path

sys.path += [str(ROOT / "tests" / "unit" / folder) for folder in ("serving", "tasks")]

from serving_worker import Archive
from vision_worker import PHOTOS

from every_task import SERVED, bodies, close, saved

pytestmark = pytest.mark.slow

# Tasks whose answers are drawn, with what to ask.
DRAWN: dict[str, dict[str, Any]] = {
    "object_detector": {"threshold": 0.0},
    "image_segmenter": {"format": "png"},
    "depth_estimator": {},
}
CONFIG = """
batchSize: 4
maxBatchDelay: 200
maxWorkers: 1
pt2: {{compile: {{enable: {compiled}, backend: openvino}}}}
handler:
  openvino:
    text: {{lengths: [16, 64]}}
    audio: {{max_seconds: 2.0}}
    batching: {{buckets: [4]}}
    fallback: {{allow: [], on_violation: warn}}
"""


def eager(task: str, folder: Path, place: Path) -> list[Any]:
    """The answers of the task's handler in this process, in eager PyTorch, one request at a time."""
    import yaml

    made = Archive(place / "eager", yaml.safe_load(CONFIG.format(compiled="false")), None, batch_size=4)
    shutil.copytree(folder, place / "eager" / "hub")
    path = Path(handler_path(task))
    module = importlib.import_module(f"torchserve_openvino.entrypoints.{path.parent.name}.{task}")
    (kind,) = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    handler = kind()
    handler.initialize(made.context)
    answers = [made.handle(handler, body)[0] for body in bodies(task)]
    return [json.loads(each if isinstance(each, bytes) else json.dumps(each)) for each in answers]


@pytest.mark.parametrize("task", SERVED)
def test_answers_over_rest_are_eagers(task: str, server: TorchServeProcess, tmp_path: Path) -> None:
    folder = saved(task, tmp_path / "saved")
    config = tmp_path / "model-config.yaml"
    config.write_text(CONFIG.format(compiled="true"))
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--task", task]
    command += ["--model-name", f"every_{task}", "--config-file", config, "--export-path", server.model_store]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"every_{task}"
    answer = server.register(f"{name}.mar", name)
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(60)}"
    server.wait_ready(name)

    def post(body: Any) -> httpx.Response:
        url = f"{server.inference_url}/predictions/{name}"
        if isinstance(body, bytes):
            return httpx.post(url, content=body, timeout=120)
        return httpx.post(url, json=body, timeout=120)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, bodies(task)))
    assert [each.status_code for each in answers] == [200] * 4, answers[0].text[:500]
    # Pictures of depth are rounded to whole levels.
    close([each.json() for each in answers], eager(task, folder, tmp_path), but=(".depth", ".predicted_depth"))
    report = server.describe(name)
    summary = report["summary"]
    print(f"{task}: coverage {summary['coverage']:.3f}, fallbacks {summary['fallbacks']}")
    assert summary["coverage"] == 1.0 and report["fallbacks"] == [] and report["verify"]["passed"]
    assert report["serving"]["compiles_after_ready"] == 0
    if task in DRAWN:
        the_client_draws(task, name, server, tmp_path)
    httpx.delete(f"{server.management_url}/models/{name}", timeout=60)


def the_client_draws(task: str, name: str, server: TorchServeProcess, place: Path) -> None:
    """scripts/predict.py asks about a photo, and draws the answer over it."""
    photo, out = place / "photo.png", place / "drawn.png"
    PHOTOS[0].save(photo)
    command = [sys.executable, ROOT / "scripts" / "predict.py", name, photo, "--out", out]
    command += ["--parameters", json.dumps(DRAWN[task]), "--url", server.inference_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and f"wrote {out}" in done.stdout.replace("\n", ""), done.stdout + done.stderr
    drawn = Image.open(out).convert("RGB")
    # A legend may stand beside the photo.
    width, height = PHOTOS[0].size
    drawn = drawn.crop((0, 0, round(drawn.height * width / height), drawn.height))
    plain = np.asarray(PHOTOS[0].convert("RGB").resize(drawn.size), dtype=int)
    assert float((abs(np.asarray(drawn, dtype=int) - plain) > 30).mean()) > 0.001
