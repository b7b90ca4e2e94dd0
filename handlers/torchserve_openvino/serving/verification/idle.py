"""Detects when no request is in progress, so that background work may start or continue."""

import threading
import time


class ShuttingDownError(BaseException):
    """The worker shuts down, so background work must stop. A `BaseException`, so that no model catches it."""


class IdleGate:
    """Tracks whether requests are in progress.

    Args:
        seconds: Idle time before it counts as quiet: an answer is sent only after it has left the handler.

    Attributes:
        waited: Seconds spent in `wait` so far, over all calls.
    """

    def __init__(self, seconds: float = 0.005) -> None:
        self.waited = 0.0
        self._seconds = seconds
        self._changed = threading.Condition()
        self._running = 0
        self._last = 0.0
        self._ended = False

    @property
    def disturbed(self) -> bool:
        """Whether `wait` would block or raise; takes no lock, so that it can be read often."""
        return self._running > 0 or self._ended or time.monotonic() < self._last + self._seconds

    def began(self) -> None:
        """Records that a request has started."""
        with self._changed:
            self._running += 1

    def ended(self) -> None:
        """Records that a request has been answered."""
        with self._changed:
            self._running -= 1
            self._last = time.monotonic()
            if not self._running:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits, which raise `ShuttingDownError`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Blocks until it is quiet.

        Raises:
            Ended: `close` was called.
        """
        start = time.monotonic()
        with self._changed:
            while not self._ended:
                left = self._last + self._seconds - time.monotonic()
                if not self._running and left <= 0:
                    break
                self._changed.wait(None if self._running else left)
            self.waited += time.monotonic() - start
            if self._ended:
                raise ShuttingDownError

    def pause(self, seconds: float) -> None:
        """Sleeps, whether or not requests are in progress.

        Raises:
            Ended: `close` was called.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._ended:
                raise ShuttingDownError
