"""What benchmarks/serving.py is made of: contenders, load client, measurements, tables and plots."""

import signal
import sys
from types import FrameType


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP an exception: the servers must be stopped on the way out."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
