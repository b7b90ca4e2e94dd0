"""A process with one loaded archive, as a worker has it: answers requests and says how long each call took.

Reads one JSON line per command, writes one JSON line per answer, on a descriptor of its own: handlers may print.
"""

import base64
import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
from torchserve_openvino.serving.observation.load import without_saving
from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tune.observing import SizeObserver


class LoadedArchive:
    """The loaded archive.

    Args:
        archive: The .mar.
        bodies: File and content type of each request.
    """

    def __init__(self, archive: Path, bodies: list[tuple[str, str]]) -> None:
        with without_saving():
            self._service = ArchiveService(archive, lambda *_: None)
        self._requests = [
            Request(row_of(Path(path).read_bytes(), kind, {}), {"content-type": kind}) for path, kind in bodies
        ]
        # Requests of a folder may be sorted by size; calls must have mixed ones, as under load.
        self._order = random.Random(0).sample(range(len(bodies)), len(bodies))
        self._observer = SizeObserver(self._service.handler, worker_of(self._service.handler))

    def report(self) -> dict[str, Any]:
        """Returns the model's report."""
        return self._service.describe()

    def answers(self) -> list[dict[str, Any]]:
        """Answers each request by itself."""
        result = []
        for index in range(len(self._requests)):
            self._observer.begin_request()
            (answer,) = self._service.answer([self._request(index)])
            body = base64.b64encode(answer.body).decode()
            result.append({"status": int(answer.status), "content_type": answer.content_type, "body": body})
        return result

    def _request(self, index: int) -> Request:
        """Returns a copy of a request, as a user's handler may change what it gets."""
        request = self._requests[index]
        return replace(request, row=dict(request.row))

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of the requests that were answered so far; JSON-safe."""
        return self._observer.to_plain()

    def call(self, size: int, first: int) -> float:
        """Returns the milliseconds of one call with so many requests.

        Args:
            size: Number of requests.
            first: Position of the first one, in an order that is the same in each process.
        """
        batch = [self._request(self._order[(first + index) % len(self._order)]) for index in range(size)]
        start = time.perf_counter()
        answers = self._service.answer(batch)
        elapsed = (time.perf_counter() - start) * 1e3
        if refused := [answer for answer in answers if answer.status != 200]:
            raise TorchServeOpenVINOError(f"a request was answered {refused[0].status}: {refused[0].body[:200]!r}")
        return elapsed


def main() -> None:
    """Serves commands until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    # What a handler prints must not end up among the replies.
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    worker = None
    try:
        worker = LoadedArchive(Path(order["archive"]), [(path, kind) for path, kind in order["bodies"]])
        reply: dict[str, Any] = {"report": worker.report()}
    except Exception as error:
        # Whatever an archive raises is the reason why its candidates are out.
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply, default=str), file=replies, flush=True)
    if worker is None:
        return
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "answers":
                reply = {"answers": worker.answers(), "report": worker.report()}
            elif command["do"] == "sizes":
                reply = {"sizes": worker.sizes()}
            else:
                size, first = command["size"], command["first"]
                reply = {"ms": [worker.call(size, first + size * turn) for turn in range(command["calls"])]}
        except TorchServeOpenVINOError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply, default=str), file=replies, flush=True)


if __name__ == "__main__":
    main()
