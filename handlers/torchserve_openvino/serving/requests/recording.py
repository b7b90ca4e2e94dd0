"""Keeps some requests in a folder (`handler.openvino.record`), with which `tune` and `bench` measure."""

import contextlib
import importlib
import json
import logging
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from torchserve_openvino.bench.bodies import suffix_of
from torchserve_openvino.config.sections.openvino_section import RecordSection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.serving.loading.files import archived_file, private_folder
from torchserve_openvino.serving.requests.messages import Request, Response

logger = logging.getLogger(__name__)

KEY = "handler.openvino.record"
# Requests that wait for the thread that writes them: a slow disk or hook costs samples, never requests.
_WAITING = 16
# Under which of these TorchServe passes a request's body.
_BODIES = ("body", "data")

Scrub = Callable[[bytes, str], bytes | None]


@dataclass(frozen=True)
class _Taken:
    """The content of a request, before its handler could change it."""

    index: int
    content: bytes
    content_type: str


class Recorder:
    """Writes one request in ``every`` to a folder, once it was answered.

    Each file is complete or absent, and private to this user. What a hook (``scrub``) does not return is not kept, nor
    what it fails on.

    Args:
        section: ``handler.openvino.record``, with a folder.
        model_dir: The unpacked archive, which has the hook.

    Raises:
        ModelLoadError: The folder can't be used, or the hook can't be loaded.
    """

    def __init__(self, section: RecordSection, model_dir: Path) -> None:
        assert section.folder is not None
        self._folder = Path(section.folder)
        private_folder(self._folder, f"{KEY}.folder")
        self._section = section
        self._scrub = _hook(model_dir, section.scrub) if section.scrub is not None else None
        # Workers that start together would all keep the same requests of a client that repeats itself.
        self._seen = random.randrange(section.every)
        self._waiting: queue.Queue[_Taken] = queue.Queue(_WAITING)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("kept", "scrubbed", "dropped"), 0)
        self._reason = ""
        threading.Thread(target=self._write_all, name="recorder", daemon=True).start()

    def take(self, requests: Sequence[Request]) -> list[_Taken]:
        """Returns copies of some requests of a call, for `keep`."""
        return list(self._taken(requests))

    def keep(self, taken: Sequence[_Taken], responses: Sequence[Response]) -> None:
        """Writes those of a call's requests that were answered."""
        for sample in taken:
            if responses[sample.index].status < HTTPStatus.BAD_REQUEST:
                try:
                    self._waiting.put_nowait(sample)
                except queue.Full:
                    self._count("dropped")

    def to_dict(self) -> dict[str, Any]:
        """Returns how many requests were kept, how many the hook left out, and how many could not be kept and why."""
        with self._lock:
            return {"folder": str(self._folder), **self._counts, "reason": self._reason}

    def close(self) -> None:
        """Waits until all requests taken so far are written."""
        self._waiting.join()

    def _taken(self, requests: Sequence[Request]) -> Iterator[_Taken]:
        for index, request in enumerate(requests):
            if request.asks_health:
                continue
            with self._lock:
                self._seen += 1
                due = self._seen % self._section.every == 0
            if not due:
                continue
            if request.explains or request.path:
                self._count("dropped", "a request was sent to another URL than the model's own, where it can't be sent")
                continue
            body = _body(request.row)
            if body is None:
                self._count("dropped", "a request has several parts, and only one with a body can be sent again")
                continue
            yield _Taken(index, *_content(body, _content_type(request)))

    def _write_all(self) -> None:
        while True:
            taken = self._waiting.get()
            try:
                self._write(taken)
            finally:
                self._waiting.task_done()

    def _write(self, taken: _Taken) -> None:
        content: bytes | None = taken.content
        if self._scrub is not None:
            try:
                content = self._scrub(taken.content, taken.content_type)
            except Exception as error:
                # The hook is the user's code, and may raise anything. What it has not cleaned is not written.
                self._count("dropped", f"{self._section.scrub} fails: {type(error).__name__}: {error}")
                return
            if content is None:
                self._count("scrubbed")
                return
            if not isinstance(content, (bytes, bytearray)):
                self._count("dropped", f"{self._section.scrub}: scrub returned {type(content).__name__}, not bytes")
                return
        if not content:
            self._count("dropped", "a request is empty")
            return
        try:
            if (reason := self._full(len(content))) is not None:
                self._count("dropped", reason)
                return
            name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
            write_atomically(self._folder / (name + suffix_of(taken.content_type)), bytes(content), sync=False)
        except OSError as error:
            self._count("dropped", f"{self._folder}: {error.strerror}")
            return
        self._count("kept")

    def _full(self, more: int) -> str | None:
        """Returns why the folder, to which all workers write, takes no further file of so many bytes."""
        sizes = [entry.stat().st_size for entry in self._folder.iterdir() if entry.is_file()]
        if len(sizes) >= self._section.most:
            return f"{self._folder} holds {len(sizes)} requests ({KEY}.most: {self._section.most})"
        if sum(sizes) + more > self._section.max_mb * 1e6:
            return f"{self._folder} would hold more than {self._section.max_mb:g} MB ({KEY}.max_mb)"
        return None

    def _count(self, name: str, reason: str = "") -> None:
        with self._lock:
            self._counts[name] += 1
            new, self._reason = reason not in {"", self._reason}, reason or self._reason
        if new:
            logger.warning("A request is not recorded: %s", reason)


def _hook(model_dir: Path, name: str) -> Scrub:
    """Returns the function ``scrub`` of a file in the archive."""
    file = archived_file(model_dir, name, f"{KEY}.scrub")
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise ModelLoadError(f"{KEY}.scrub: {name} fails: {type(error).__name__}: {error}") from error
    hook = getattr(module, "scrub", None)
    if not callable(hook):
        raise ModelLoadError(
            f"{KEY}.scrub: {name} must define `scrub(body: bytes, content_type: str) -> bytes | None`."
        )
    checked: Scrub = hook
    return checked


def _body(row: Mapping[str, Any]) -> Any:
    """Returns the body of a request that has nothing else; None for others."""
    names = [name for name in _BODIES if name in row] if isinstance(row, Mapping) else []
    return row[names[0]] if len(names) == 1 and len(row) == 1 else None


def _content(body: Any, content_type: str) -> tuple[bytes, str]:
    """Returns the bytes that are sent for a body, and their type: the frontend has parsed JSON and text."""
    if isinstance(body, (bytes, bytearray)):
        return bytes(body), content_type or "application/octet-stream"
    if isinstance(body, str):
        # Half of a surrogate pair, which is no text by itself, can only have come as JSON.
        with contextlib.suppress(UnicodeEncodeError):
            return body.encode(), "text/plain"
    return json.dumps(body).encode(), "application/json"


def _content_type(request: Request) -> str:
    return (request.header("Content-Type") or "").partition(";")[0].strip().lower()
