"""What each task answers to good and bad requests is as transcribed: status, type and body.

A change of the request path must leave these files as they are. Where an answer is meant to change, write them anew:

    TRANSCRIBE=1 python -m pytest tests/unit/hosts/test_transcripts.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from every_task import SERVED, bodies, close, saved
from torchserve_openvino.cli import app
from torchserve_openvino.errors import ItemError
from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
from torchserve_openvino.serving.requests.messages import Request, Response

FOLDER = Path(__file__).parent / "transcripts"
JSON = "application/json"
CONFIG = """
batchSize: 4
pt2: {compile: {enable: true, backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
handler:
  openvino:
    text: {lengths: [16, 64]}
    audio: {max_seconds: 2.0}
    batching: {buckets: [4]}
"""
# Of longer texts, such as pictures, and lists, only their lengths are transcribed.
LONGEST_TEXT, LONGEST_LIST = 500, 40


def loaded(task: str, folder: Path) -> ArchiveService:
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    arguments = ["package", "--hf", saved(task, folder / "saved"), "--task", task, "--model-name", "transcribed"]
    arguments += ["--config-file", folder / "config.yaml", "--export-path", folder]
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return ArchiveService(folder / "transcribed.mar", lambda *_: None, folder / "unpacked")


def requests_to(task: str) -> dict[str, tuple[bytes, str]]:
    """Bodies and their types, by what is special about them."""
    good = bodies(task)
    made = {
        f"request {number}": (body, "audio/wav") if isinstance(body, bytes) else (json.dumps(body).encode(), JSON)
        for number, body in enumerate(good, 1)
    }
    bad: dict[str, Any] = {
        "a number": 7,
        "a list of nothing": [],
        "another field": {"wrong": "text"},
        "inputs of another type": {"inputs": [{"a": 1}, 3.5]},
    }
    if isinstance(good[0], dict):
        bad["an unknown parameter"] = {**good[0], "parameters": {"nope": 1}}
    made |= {name: (json.dumps(body).encode(), JSON) for name, body in bad.items()}
    return made | {
        "broken JSON": (b'{"inputs": ', JSON),
        "JSON with NaN": (b'{"inputs": NaN}', JSON),
        "nothing": (b"", JSON),
        "bytes": (bytes(range(256)), "application/octet-stream"),
        "text that is no text": (b"\xff\xfe", "text/plain"),
    }


def short(value: Any) -> Any:
    """What is transcribed of a body."""
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list):
        return f"<{len(value)} values>" if len(value) > LONGEST_LIST else [short(each) for each in value]
    if isinstance(value, str):
        return f"<{len(value)} characters>" if len(value) > LONGEST_TEXT else value
    return float(f"{value:.5g}") if isinstance(value, float) else value


def transcript(response: Response) -> dict[str, Any]:
    body = bytes(response.body)
    shown = json.loads(body) if response.content_type.startswith(JSON) else f"<{len(body)} bytes>"
    return {"status": response.status, "type": response.content_type, "body": short(shown)}


def answered(service: ArchiveService, body: bytes, kind: str) -> Response:
    try:
        return service.answer([Request(row_of(body, kind, {}))])[0]
    except ItemError as error:
        return Response.refused(error)


@pytest.mark.quick("question_answerer", "image_embedder", "audio_classifier")
@pytest.mark.parametrize("task", SERVED)
def test_answers_are_as_transcribed(task: str, tmp_path: Path) -> None:
    service = loaded(task, tmp_path)
    asked = requests_to(task)
    made = {name: transcript(answered(service, *request)) for name, request in asked.items()}
    # In one call, each has its own.
    good = [name for name in asked if name.startswith("request")]
    together = service.answer([Request(row_of(*asked[name], {})) for name in good])
    for name, response in zip(good, together, strict=True):
        close(transcript(response), made[name], f"{name}, with others")
    path = FOLDER / f"{task}.json"
    if os.environ.get("TRANSCRIBE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    close(made, json.loads(path.read_text(encoding="utf-8")), task)


def test_each_task_is_transcribed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(SERVED)
