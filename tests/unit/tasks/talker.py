"""A text generator in this process, in eager PyTorch, with a socket as TorchServe's."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving_worker import Archive
from task_worker import Worker
from ts import async_service
from ts.service import Service

from torchserve_openvino.tasks.generation.generator import TextGenerator

EAGER: dict[str, Any] = {"pt2": {"compile": {"enable": False}}}
CHAT, COMPLETION = "v1/chat/completions", "v1/completions"
# TorchServe asks for the report by a header.
DESCRIBE = "describe"


class Talker(Worker):
    """A worker with a socket, as TorchServe's."""

    def __init__(self, place: Path, folder: Path, name: str = "net", **keys: Any) -> None:
        self.made = Archive(place, {**EAGER, **keys}, None, batch_size=int(keys.get("batchSize", 4)))
        self.made.metrics.model_name = name
        (place / "hub").symlink_to(folder)
        self.folder = folder
        self.handler = TextGenerator()
        self.mine, self.theirs = socket.socketpair()
        self.made.context.cl_socket = self.mine
        self.handler.initialize(self.made.context)

    def ask(self, path: str, *bodies: Any) -> list[Any]:
        """The answers to a batch of requests to an endpoint."""
        return self.made.handle(self.handler, *bodies, url_path=path)

    def streamed(self) -> bytes:
        """What was sent meanwhile."""
        self.theirs.setblocking(False)
        found = b""
        try:
            while some := self.theirs.recv(1 << 20):
                found += some
        except BlockingIOError:
            return found
        return found

    def close(self) -> None:
        self.handler.engine.close()
        self.mine.close()
        self.theirs.close()


def events(text: str | bytes) -> list[Any]:
    """The data of server-sent events; the last one has to be [DONE]."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    *found, last = re.findall(r"data: (.*)\n\n", text)
    assert last == "[DONE]"
    return [json.loads(each) for each in found]


class Frontend:
    """TorchServe's service for `asyncCommunication: true` around a handler, with what it would send."""

    def __init__(self, talker: Talker) -> None:
        self.talker = talker
        self._received = b""
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._reads.start()

    def _read(self) -> None:
        self.talker.theirs.setblocking(True)
        while some := self.talker.theirs.recv(1 << 16):
            self._received += some

    def ask_all(self, requests: list[tuple[str, bytes]]) -> list[bytes]:
        return self.ends(self.talker, requests)

    @classmethod
    def ends(cls, talker: Any, requests: list[tuple[str, bytes]], entry: Any = None) -> list[bytes]:
        """All final responses of a worker; each request in flight at once."""
        made = talker.made
        folder = made.context.system_properties["model_dir"]
        service = Service("net", folder, made.manifest, entry or talker.handler.handle, None, 1, True, made.metrics)
        service.set_cl_socket(talker.mine)

        async def run() -> list[Any]:
            rows = [cls._row(number, *each) for number, each in enumerate(requests)]
            return await asyncio.gather(*(async_service.predict(service, [row]) for row in rows))

        return [bytes(each) for each in asyncio.run(run())]

    @staticmethod
    def _row(number: int, path: str, body: bytes) -> dict[str, Any]:
        headers = [{"name": b"url_path", "value": path.encode()}, {"name": b"explain", "value": b"False"}]
        headers.append({"name": b"describe", "value": str(path == DESCRIBE).encode()})
        given = {"name": "body", "contentType": "", "value": body}
        return {"requestId": f"request-{number:02}".encode(), "headers": headers, "parameters": [given]}

    def received(self, until: Callable[[bytes], bool]) -> bytes:
        for _ in range(500):
            if until(self._received):
                return self._received
            threading.Event().wait(0.01)
        raise AssertionError(self._received[-2000:])
