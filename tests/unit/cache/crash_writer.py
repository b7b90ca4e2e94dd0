"""Puts an entry in forked children: the n-th child kills itself before its n-th system call, for every n in turn.

Run as a program: `crash_writer.py FOLDER HOW`. It prints one line per killed child: the call before which it died.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_helpers import FILES, object_of, put

from torchserve_openvino.cache.storage.store import Store

STEPS = ("open", "write", "fsync", "replace", "mkdir", "utime", "unlink", "close", "listdir", "scandir")
NEW = {"model.xml": b"<other/>" * 100, "model.bin": FILES["model.bin"], "third": b"3" * 70_000}
LIMIT = 100_000


def prepare(root: Path, how: str) -> None:
    """Prepares the store: absent, with an older version of the entry, with a damaged object, or full."""
    if how == "fresh":
        return
    store = Store(root)
    put(store)
    if how == "damaged":
        object_of(store).write_bytes(b"?" * 10240)
    if how == "full":
        put(store, 2, files={"old": b"2" * 90_000})
        put(store, 1)


def write(root: Path, how: str) -> None:
    """Does the put to interrupt."""
    put(Store(root, limit_bytes=LIMIT if how == "full" else 2**30), 1, body={"new": True}, files=NEW)


def die_at(step: int) -> None:
    """Makes this process kill itself before the given call; a write is half done by then."""
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            if len(calls) == step:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                print(name, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for name in STEPS:
        setattr(os, name, wrap(name, getattr(os, name)))


def main(folder: Path, how: str) -> None:
    base = folder / "before"
    prepare(base, how)
    step = 0
    while True:
        step += 1
        root = folder / f"{step:03d}"
        if base.exists():
            shutil.copytree(base, root)
        child = os.fork()
        if child == 0:
            die_at(step)
            write(root, how)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
