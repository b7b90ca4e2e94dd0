"""Reads README.md, CONTRIBUTING.md and docs/: their pages, and the code blocks in them."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import jsonschema

ROOT = Path(__file__).resolve().parents[1]
TASKS = "docs/tasks.md"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: The page that contains it, relative to the root.
        language: The language after the fence.
        text: The code.
    """

    page: str
    language: str
    text: str


def pages() -> dict[str, str]:
    """Text of each page, by its path relative to the root."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def blocks(language: str) -> list[Block]:
    """All code blocks of one language, without duplicates."""
    found: dict[str, Block] = {}
    for page, text in pages().items():
        for name, code in _FENCED.findall(text):
            if name == language:
                found.setdefault(code, Block(page, name, code))
    return list(found.values())


def commands() -> list[str]:
    """The lines of all shell code, without duplicates; continued lines are joined."""
    joined = [re.sub(r"\\\n\s*", "", block.text) for block in blocks("sh")]
    return list(dict.fromkeys(line.strip() for text in joined for line in text.splitlines() if line.strip()))


def section_blocks(page: str, heading: str, language: str) -> list[str]:
    """The code blocks of one section of a page, in their order, as they are written."""
    (text,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", pages()[page], re.MULTILINE | re.DOTALL)
    return [code for name, code in _FENCED.findall(text) if name == language]


def task_examples() -> dict[str, tuple[str, Any]]:
    """Of each task in docs/tasks.md: its request, and the answer that is shown, parsed."""
    return {task: (request, json.loads(answer)) for request, task, _, answer in _examples()}


def python_answer(task: str, respond: Callable[[httpx.Request], httpx.Response]) -> Any:
    """Runs the Python of a task in docs/tasks.md.

    Args:
        task: The task.
        respond: Stands in for the server.

    Returns:
        What its last line is worth.
    """
    (code,) = [lines for _, name, lines, _ in _examples() if name == task]
    (client,) = [each.text for each in blocks("python") if each.page == TASKS and "httpx.Client" in each.text]
    *before, last = code.splitlines()
    space: dict[str, Any] = {}
    mocked = functools.partial(httpx.Client, transport=httpx.MockTransport(respond))
    with mock.patch.object(httpx, "Client", mocked):
        exec("\n".join([client, *before]), space)
        return eval(last, space)


def _examples() -> list[tuple[str, str, str, str]]:
    """Of each task in docs/tasks.md: the line with curl, its name, the Python, and the answer."""
    fences = r"^(curl [^\n]*/predictions/(\w+))\n```\n\n```python\n(.+?)\n```\n\n```json\n(.+?)\n```"
    return re.findall(fences, pages()[TASKS], re.MULTILINE | re.DOTALL)


def same_form(answer: Any, example: Any) -> bool:
    """Whether an answer has the types of an example, and its keys unless these are labels."""
    if isinstance(example, dict) and isinstance(answer, dict):
        # {label: probability}, or a box under its label.
        labels = all(isinstance(value, float) for value in example.values())
        labels |= any(isinstance(value, list) for value in example.values())
        return labels or answer.keys() == example.keys()
    if isinstance(example, list) and isinstance(answer, list):
        return not answer or same_form(answer[0], example[0])
    return type(answer) is type(example)


def schema_problems(task: str, what: str, value: Any) -> list[str]:
    """What docs/schemas finds wrong in a value.

    Args:
        task: The task.
        what: ``request``, ``answer`` to one input, or ``answers`` to a list.
        value: Parsed from JSON.
    """
    schema = json.loads((ROOT / "docs" / "schemas" / f"{task}.json").read_text(encoding="utf-8"))
    part = {"$schema": schema["$schema"], "$ref": f"#/$defs/{what}", "$defs": schema["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(part).iter_errors(value)]
