"""How an engine says that it generates no more."""

import threading
from collections.abc import Callable


class DiesOnError:
    """An engine that may die; part of `engine.Engine`."""

    def __init__(self) -> None:
        self._dead: str | None = None
        self._when_dead: Callable[[], None] | None = None
        self._deciding = threading.Lock()

    @property
    def dead(self) -> str | None:
        """Why the engine generates no more; None while it does."""
        return self._dead

    def when_dead(self, call: Callable[[], None]) -> None:
        """Calls something once the engine generates no more, unless it was closed; at once if that is so already."""
        with self._deciding:
            self._when_dead = call
            dead = self._dead is not None
        if dead:
            call()

    def _die(self, reason: str) -> Callable[[], None]:
        """Notes why; returns what to call once nobody waits for the engine any more."""
        with self._deciding:
            self._dead = reason
            return self._when_dead or (lambda: None)
