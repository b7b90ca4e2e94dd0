"""`BatchDelay`: how long a batch waits for further requests."""

# Batches in a row that nobody joined, after which waiting is given up.
_LONE_BATCHES = 8


class BatchDelay:
    """`maxBatchDelay`, but for requests that come one by one.

    A client that waits for each answer before it sends the next request would pay the whole delay each time, for
    company that cannot come. After some batches of one request, all of which waited in vain, batches are released at
    once, until two requests are open at the same time.

    Args:
        most: The longest wait, in seconds.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._lone = 0

    @property
    def seconds(self) -> float:
        """How long the next batch waits."""
        return self._most if self._lone < _LONE_BATCHES else 0.0

    def on_request(self, others: int) -> None:
        """Takes note of a request that comes while so many others are not answered."""
        if others:
            self._lone = 0

    def on_batch(self, size: int) -> None:
        """Takes note of a batch that is released."""
        self._lone = self._lone + 1 if size == 1 else 0
