"""Starts the process that generates, and talks to it.

It is a process of its own because GenAI holds Python's lock during a step, and because an error in native code, or a
lack of memory, then ends this process and not the worker: TorchServe 0.12 can't replace a worker with
``asyncCommunication`` to which requests come.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.text.genai import child_main
from torchserve_openvino.generation.text.genai.engine_messages import Command, Update, command_bytes, update_of
from torchserve_openvino.generation.text.genai.pipeline import PipelineSettings

_END_SECONDS = 10.0


class Link:
    """The way to a process that generates.

    Args:
        connection: To the process.
        process: The process; None if `stepping.serve` runs elsewhere.
    """

    def __init__(self, connection: Connection, process: "subprocess.Popen[bytes] | None") -> None:
        self._connection, self._process = connection, process

    @property
    def pid(self) -> int | None:
        """The process."""
        return self._process.pid if self._process is not None else None

    def send(self, command: Command) -> bool:
        """Sends a command; returns whether somebody is there to read it. For one thread at a time."""
        try:
            self._connection.send_bytes(command_bytes(command))
        except OSError:
            # `receive` sees the end too, and says what happened.
            return False
        return True

    def receive(self) -> Update | None:
        """Waits for the next update; None once the process is gone. For one thread at a time."""
        try:
            return update_of(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None:
            self._process.kill()

    def ended(self) -> str:
        """Waits for the end of a process that closed its side of the connection, and returns how it ended."""
        self._connection.close()
        if self._process is None:
            return "it ended"
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return how_it_ended(code)


def how_it_ended(code: int) -> str:
    """Returns what the exit code of a process means."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    memory = "; if nobody killed it, memory ran out: see dmesg" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{memory}"


class Child:
    """A process that is about to generate: it imports what it needs, and waits for a model.

    Args:
        connection: To the process.
        process: The process.
    """

    def __init__(self, connection: Connection, process: "subprocess.Popen[bytes]") -> None:
        self._link = Link(connection, process)
        self._connection = connection
        self.loaded = False

    def load(self, folder: Path, settings: PipelineSettings, eos: Sequence[int]) -> Link:
        """Loads a model.

        Args:
            folder: With the exported model; not read any more afterwards.
            settings: How the pipeline is built.
            eos: Tokens that end a sequence.

        Raises:
            ModelLoadError: openvino-genai is not installed, or refuses the model or a property, or the process ended.
        """
        request = {"folder": os.fspath(folder), "settings": asdict(settings), "eos": list(eos)}
        try:
            self._connection.send_bytes(json.dumps(request, default=str).encode())
            error = json.loads(self._connection.recv_bytes())["error"]
        except (EOFError, OSError):
            raise ModelLoadError(f"OpenVINO GenAI cannot load the exported model: {self._link.ended()}.") from None
        if error is not None:
            self._link.ended()
            raise ModelLoadError(error)
        self.loaded = True
        return self._link

    def end(self) -> None:
        """Ends the process at once."""
        self._link.kill()
        self._link.ended()


@contextlib.contextmanager
def begun() -> Iterator[Child]:
    """Starts a process that generates; it ends with the context if it has loaded nothing by then."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", child_main.__name__, str(theirs.fileno())],
            # TorchServe reads metrics from the worker's output, whose lines must not be torn.
            stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
            # It imports what this process imports, from wherever that is.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    generating = Child(Connection(ours.detach()), process)
    try:
        yield generating
    finally:
        if not generating.loaded:
            generating.end()
