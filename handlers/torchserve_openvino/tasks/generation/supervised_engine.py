"""Keeps a generator: an engine that dies is started again in the same worker."""

import logging
import threading
from collections.abc import Callable

from torchserve_openvino.generation.text.engine import Engine, Load
from torchserve_openvino.tasks.generation.engines import Generator

logger = logging.getLogger(__name__)


class SupervisedEngine:
    """The engine of a worker.

    A new worker would load its libraries and its tokenizer once more, and TorchServe 0.12 can't replace a worker with
    ``asyncCommunication`` to which requests come meanwhile. So the worker lives on, and refuses requests until its
    engine runs again.

    Args:
        start: Starts an engine.
        changed: Called with the generator that was started again.

    Attributes:
        generator: The engine, and how it came to be.
    """

    def __init__(self, start: Callable[[], Generator], changed: Callable[[Generator], None]) -> None:
        self._start, self._changed = start, changed
        self._lock = threading.Lock()
        self._starting = False
        self._closing = False
        self.generator = self._begin()

    @property
    def engine(self) -> Engine:
        """The engine that runs, or ran last."""
        return self.generator.engine

    def load(self) -> Load:
        """Returns what the engine does now."""
        return self.engine.load()

    def close(self) -> None:
        """Ends all sequences, and frees the model; no other engine starts."""
        self._closing = True
        self.engine.close()

    def _begin(self) -> Generator:
        generator = self._start()
        generator.engine.when_dead(self.revive)
        return generator

    @property
    def dead(self) -> str | None:
        """Why nothing is generated; None while the engine works."""
        return self.generator.dead

    def revive(self) -> None:
        """Starts another engine if this one is dead, in a thread of its own; returns at once."""
        with self._lock:
            if self.dead is None or self._starting or self._closing:
                return
            self._starting = True
        logger.error("ERROR: the engine is dead and starts again: %s", self.dead)
        threading.Thread(target=self._run, name="text-generation-start", daemon=True).start()

    def _run(self) -> None:
        try:
            self.generator = self._begin()
            self._changed(self.generator)
            logger.info("The engine was started again: %s", self.generator.summary())
        except Exception:
            logger.exception("ERROR: the engine could not be started again; the next request tries once more")
        finally:
            self._starting = False
