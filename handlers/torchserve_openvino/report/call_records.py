"""What one call added to the records, so that it can be withdrawn if the call gives no answer."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CallRecords(threading.local):
    """The call of a model that runs in this thread.

    A call that eager PyTorch rejects as well has no answer that could have come from OpenVINO: it is no fallback.
    """

    _undo: list[Callable[[], None]] | None = None
    _notices: list[Callable[[], None]]

    def run(self, call: Callable[[], T]) -> T:
        """Returns the result of a call of the model; withdraws what it added if it raises."""
        if self._undo is not None:
            # Inside another call, whose end decides about both.
            return call()
        self._undo, self._notices = [], []
        try:
            result = call()
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        finally:
            self._undo = None
        for notice in self._notices:
            notice()
        return result

    def added(self, undo: Callable[[], None]) -> None:
        """Notes how to withdraw an addition."""
        if self._undo is not None:
            self._undo.append(undo)

    def when_answered(self, notice: Callable[[], None]) -> None:
        """Calls ``notice``, which logs a fallback, once the call has given an answer."""
        if self._undo is None:
            notice()
        else:
            self._notices.append(notice)
