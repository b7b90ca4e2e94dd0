"""Ends groups of processes, also those that another process started."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import psutil

STOP_SECONDS = 15.0


def group_members(group: int) -> list[psutil.Process]:
    """The living processes of a group. Zombies, which a container without an init keeps, don't count."""
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def stop_group(group: int, timeout: float = STOP_SECONDS) -> None:
    """Sends SIGTERM to a process group, and SIGKILL to what is left of it after `timeout` seconds."""
    for signum, patience in ((signal.SIGTERM, timeout), (signal.SIGKILL, 5.0)):
        if not group_members(group):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signum)
        end = time.monotonic() + patience
        while group_members(group) and time.monotonic() < end:
            time.sleep(0.1)


def end_piped(process: "subprocess.Popen[str]") -> None:
    """Kills a process, and closes the pipes to it and from it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # What it had not read yet is lost with it.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Holds back SIGINT and SIGTERM until the end of the block; in other threads than the main one it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def hold(signum: int, _: FrameType | None) -> None:
        received.append(signum)

    before = {signum: signal.signal(signum, hold) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for restored, handler in before.items():
            # None: it was set by C code, and cannot be set from here.
            signal.signal(restored, handler if handler is not None else signal.SIG_DFL)
    for signum in dict.fromkeys(received):
        signal.raise_signal(signum)


def is_recorded_alive(record: Mapping[str, Any]) -> bool:
    """Whether the recorded server still runs, and its pid was not reused."""
    try:
        return abs(psutil.Process(record["group"]).create_time() - record["started"]) < 1.0
    except psutil.Error:
        return False


def stop_recorded(record: Mapping[str, Any]) -> bool:
    """Ends the server of `TorchServeProcess.record`; False when it no longer runs."""
    alive = is_recorded_alive(record)
    if alive:
        stop_group(record["group"])
    shutil.rmtree(record["home"], ignore_errors=True)
    return alive
