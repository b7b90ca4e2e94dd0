"""Runs the parts of one batch in parallel: each on its own infer request, all on one compiled model.

A call of a compiled model borrows an infer request from its pool and releases the GIL during inference, so that
plain threads are enough to keep several streams busy, whatever the model's graph looks like.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchserve_openvino.serving.modes import Modes


class ParallelCalls:
    """A fixed number of threads that run calls.

    Args:
        count: How many calls run at a time, one of them in the calling thread.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="ov-stream") if count > 1 else None

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs calls, up to `count` at a time.

        Returns:
            Their results, in order.

        Raises:
            Exception: What the first failing call raised, after all have ended.
        """
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        # Modes are thread-local, and a compiled call depends on them.
        modes = Modes.now()
        others = [self._pool.submit(_with_modes, call, modes) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            for future in others:
                future.exception()
        return [first, *(future.result() for future in others)]


def _with_modes(call: Callable[[], Any], modes: Modes) -> Any:
    with modes.on():
        return call()
