"""docs/schemas: generated from the tasks' models, and right about the documented requests and answers.

Answers of real models are compared with them in the tests of the tasks.
"""

import json
import re
import subprocess
from typing import Any

import httpx
import jsonschema
import pytest

import config_reference
import task_schemas
from documents import pages, python_answer, schema_problems, task_examples

EXAMPLES = task_examples()


def test_the_generated_files_are_up_to_date() -> None:
    made = task_schemas.generated()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "python scripts/task_schemas.py --write"
    assert set(task_schemas.FOLDER.iterdir()) == set(made)


def test_what_is_not_up_to_date_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(config_reference, "ROOT", tmp_path)
    files = {tmp_path / "new" / "task.json": "{}\n"}
    with pytest.raises(SystemExit, match="1"):
        config_reference.renew(files, write=False)
    assert not (tmp_path / "new").exists() and "--write" in capsys.readouterr().out
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            config_reference.renew(files, write=True)
    assert (tmp_path / "new" / "task.json").read_text() == "{}\n"


@pytest.mark.parametrize("task", EXAMPLES)
def test_each_schema_is_one_and_is_linked(task: str) -> None:
    path = task_schemas.FOLDER / f"{task}.json"
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text(encoding="utf-8")))
    assert f"(schemas/{task}.json)" in pages()["docs/tasks.md"]


def body_of(task: str) -> Any:
    """The JSON that the documented request sends; None if it sends a file."""
    found = re.findall(r"-d '([^']+)'", EXAMPLES[task][0])
    return json.loads(found[0]) if found else None


@pytest.mark.parametrize("task", EXAMPLES)
def test_the_documented_request_and_answer_are_valid(task: str) -> None:
    body, answer = body_of(task), EXAMPLES[task][1]
    many = body is not None and isinstance(body.get("inputs"), list)
    assert schema_problems(task, "answers" if many else "answer", answer) == []
    if body is not None:
        assert schema_problems(task, "request", body) == []
        assert schema_problems(task, "request", body | {"parameters": {"no_such": 1}})


@pytest.mark.parametrize("task", EXAMPLES)
def test_the_documented_python_sends_what_curl_sends(task: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat.jpg", "street.jpg", "bark.wav", "speech.flac"):
        (tmp_path / name).write_bytes(name.encode())
    sent: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=EXAMPLES[task][1])

    assert python_answer(task, respond) == EXAMPLES[task][1]
    line = EXAMPLES[task][0]
    assert line.endswith(f" {sent[0].url}")
    body = body_of(task)
    if body is not None:
        assert json.loads(sent[0].content) == body
    elif " -T " in line:
        (name,) = re.findall(r"-T (\S+)", line)
        assert sent[0].content == name.encode()
    else:
        (body,) = re.findall(r'-d "(.+)" -H', line)
        shown = subprocess.run(["bash", "-c", f'printf %s "{body}"'], capture_output=True, text=True, check=True)
        assert json.loads(sent[0].content) == json.loads(shown.stdout)


@pytest.mark.parametrize(
    ("task", "what", "value", "valid"),
    [
        ("text_classifier", "request", {"inputs": ["a", "b"], "parameters": {"top_k": 1}}, True),
        ("text_classifier", "request", {"inputs": "a", "parameters": {"top_k": 0}}, False),
        ("text_classifier", "request", {"inputs": []}, False),
        ("text_classifier", "request", {"input": "a"}, False),
        ("text_classifier", "answers", [{"glad": 0.5}, {"code": 400, "type": "x", "message": "y"}], True),
        ("zero_shot_classifier", "request", {"inputs": "a"}, False),
        ("question_answerer", "request", {"inputs": [{"question": "a", "context": "b"}]}, True),
        ("question_answerer", "request", {"question": "a"}, False),
        ("reranker", "request", {"query": "a", "texts": ["b"], "parameters": {"raw_scores": True}}, True),
        ("object_detector", "answer", [{"car": [1, 2, 3], "score": 0.5}], False),
        ("object_detector", "answer", [{"car": [1, 2, 3, 4]}], False),
        ("object_detector", "request", {"inputs": "AAAA", "parameters": {"threshold": 2}}, False),
        ("image_segmenter", "answer", {"label_map": "iVB", "labels": {"0": "road"}}, True),
        ("depth_estimator", "answer", {"predicted_depth": [[1.0]], "depth": "iVB", "min": 0, "max": 1}, True),
    ],
)
def test_other_forms(task: str, what: str, value: Any, valid: bool) -> None:
    assert (schema_problems(task, what, value) == []) == valid
