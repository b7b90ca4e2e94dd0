"""A text generator in this process, in eager PyTorch, with a socket as TorchServe's."""

import json
import re
import socket
from pathlib import Path
from typing import Any

from serving_worker import Archive
from task_worker import Worker

from torchserve_openvino.tasks.generation.generator import TextGenerator

EAGER: dict[str, Any] = {"pt2": {"compile": {"enable": False}}}
CHAT, COMPLETION = "v1/chat/completions", "v1/completions"


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
