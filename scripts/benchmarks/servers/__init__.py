"""The parts of benchmarks/serving.py: contenders, load client, measurements, tables and plots."""

import signal
import sys
from types import FrameType


def exit_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into an exception, so that the servers are stopped on the way out."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
