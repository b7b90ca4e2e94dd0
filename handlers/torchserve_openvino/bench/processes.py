"""Ends groups of processes, also those that another process started."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
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
