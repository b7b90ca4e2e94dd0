"""When nobody waits for an answer: what work beside the requests may begin, and go on, by."""

import threading
import time


class Ended(BaseException):
    """The worker ends; whoever waited for a quiet moment stops. No model catches it."""


class Quiet:
    """Knows whether requests are in progress.

    Args:
        seconds: How long none must have been before it is quiet: an answer that left the handler is sent after that.

    Attributes:
        waited: Seconds that `wait` took so far, all calls together.
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
        """Whether `wait` would wait, or raise; free of locks, to be asked often."""
        return self._running > 0 or self._ended or time.monotonic() < self._last + self._seconds

    def began(self) -> None:
        """A request came."""
        with self._changed:
            self._running += 1

    def ended(self) -> None:
        """A request was answered."""
        with self._changed:
            self._running -= 1
            self._last = time.monotonic()
            if not self._running:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Until it is quiet.

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
                raise Ended

    def pause(self, seconds: float) -> None:
        """Sleeps, requests or not.

        Raises:
            Ended: `close` was called.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._ended:
                raise Ended
