"""`Registry`: the archives that one server serves, by name and version."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchserve_openvino.config.spelling import nearest
from torchserve_openvino.errors import (
    ConfigError,
    ItemError,
    ModelLoadError,
    ModelMissingError,
    TorchServeOpenVINOError,
)
from torchserve_openvino.hosts.background import background
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.hosts.serve.served_archive import Record, ServedArchive, count_refusal, stamp_of

logger = logging.getLogger(__name__)

# Between looks at the memory and at models that nobody uses.
_LOOK_SECONDS = 1.0


class Registry:
    """All archives; of a name without a version, the first one that was named is used.

    Args:
        archives: Paths of .mar files.
        workers: Workers of each model; None leaves that to its ``minWorkers``.
        record: Gets metrics.
        memory: Most bytes that all workers may have together; None sets no limit.
        on_change: Called with a line of text when the state of a worker changes.

    Raises:
        PackagingError: A file is no archive.
        ConfigError: The YAML of one is not valid, or two have the same name and version.
    """

    def __init__(
        self,
        archives: list[Path],
        workers: int | None,
        record: Record,
        memory: int | None = None,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._workers, self._record, self._memory, self._on_change = workers, record, memory, on_change
        self._models: dict[str, dict[str, ServedArchive]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reloading = asyncio.Lock()
        self._resting: set[ServedArchive] = set()
        # Former states of reloaded archives, which answer what they have begun.
        self._leaving: set[ServedArchive] = set()
        self._is_stopping = False
        for path in archives:
            model = self._create(path)
            versions = self._models.setdefault(model.settings.name, {})
            if (other := versions.get(model.settings.version)) is not None:
                raise ConfigError(
                    f"{path} and {other.archive} are both {model.label}. Give each a name or a version of its own "
                    "(`package --version`), or leave one out."
                )
            versions[model.settings.version] = model

    def _create(self, archive: Path) -> ServedArchive:
        settings = ModelSettings.of(archive)
        return ServedArchive(archive, settings, self._workers or settings.workers, self._record, self._on_change)

    def __iter__(self) -> Iterator[ServedArchive]:
        """Iterates over all archives."""
        return (model for versions in self._models.values() for model in versions.values())

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return list(self._models)

    def versions(self, name: str) -> list[ServedArchive]:
        """Returns all versions of a model, the default one first.

        Raises:
            ModelMissingError: There is none.
        """
        if name not in self._models:
            near = nearest(name, self.names)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ModelMissingError(f"no model {name!r} is served here; there are {', '.join(self.names)}.{hint}")
        return list(self._models[name].values())

    def model(self, name: str, version: str | None = None) -> ServedArchive:
        """Returns a version of a model; the default one without a version.

        Raises:
            ModelMissingError: It is not served.
        """
        versions = self.versions(name)
        if version is None:
            return versions[0]
        if version not in self._models[name]:
            known = ", ".join(self._models[name])
            raise ModelMissingError(f"version {version!r} of {name} is not served here; there are {known}")
        return self._models[name][version]

    def count_refusal(self, error: ItemError) -> None:
        """Counts a request that was refused before its model was found."""
        count_refusal(self._record, error)

    async def start(self) -> None:
        """Starts all models, and waits until each has a worker that is ready.

        Raises:
            TorchServeOpenVINOError: One of them is refused.
        """
        async with self._reloading:
            starts = [background(model.start(), self._tasks) for model in self]
            await asyncio.gather(*starts)
            background(self._tend(), self._tasks)

    async def stop(self, grace: float) -> None:
        """Answers what waits and runs, for at most so many seconds, and ends all workers."""
        self._is_stopping = True
        models = [*self, *self._leaving]
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.stop(grace) for model in models))

    def kill(self, reason: str) -> None:
        """Ends all workers at once."""
        for model in [*self, *self._leaving]:
            model.kill(reason)

    # --- reload -------------------------------------------------------------------------------------------------

    async def reload(self, name: str, version: str | None = None) -> ServedArchive:
        """Serves an archive's file as it is now; the former state answers until the new one is ready.

        Raises:
            ModelMissingError: It is not served.
            TorchServeOpenVINOError: The new state is refused, or the server stops; the former one goes on.
        """
        if not self._is_stopping:
            reloading = background(self._reload(name, version), self._tasks)
            try:
                return await asyncio.shield(reloading)
            except asyncio.CancelledError:
                if not reloading.cancelled():
                    # Whoever asked for it is gone; it goes on.
                    raise
        raise ModelLoadError(f"{name} is not reloaded: the server stops.")

    async def _reload(self, name: str, version: str | None) -> ServedArchive:
        async with self._reloading:
            former = self.model(name, version)
            successor = await asyncio.to_thread(self._create, former.archive)
            if successor.settings.name != name:
                raise ModelLoadError(
                    f"{former.archive} is {successor.settings.name} now, not {name}: start the server again."
                )
            other = self._models[name].get(successor.settings.version)
            if other not in (None, former):
                raise ModelLoadError(f"{former.archive} is {successor.label} now, which {other.archive} is already.")
            await successor.start()
            self._models[name] = {
                successor.settings.version if model is former else model.settings.version: successor
                if model is former
                else model
                for model in self._models[name].values()
            }
            former.hand_over(successor)
            logger.info("%s: reloaded from %s", successor.label, successor.archive)
            self._on_change(f"{successor.label} is reloaded")
            background(self._retire(former), self._tasks)
            return successor

    async def _retire(self, former: ServedArchive) -> None:
        """Lets a former state answer what it has begun."""
        self._leaving.add(former)
        try:
            await former.stop(None, f"{former.label} is replaced")
        finally:
            self._leaving.discard(former)

    def reload_changed(self) -> None:
        """Reloads each archive whose file has changed, one after the other; errors are logged."""
        background(self._reload_changed(), self._tasks)

    async def _reload_changed(self) -> None:
        for model in list(self):
            # Another signal may have replaced it meanwhile.
            if model not in list(self) or stamp_of(model.archive) == model.stamp:
                continue
            try:
                await self.reload(model.settings.name, model.settings.version)
            except (TorchServeOpenVINOError, OSError) as error:
                logger.error("%s is not reloaded, and its former state is served: %s", model.label, error)
                self._on_change(f"{model.label} is not reloaded: {error}")

    # --- models that nobody uses --------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Lets models rest that nobody uses, or whose memory others need."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for model in self:
                if model.settings.keep is not None and now - model.used >= model.settings.keep:
                    self._rest(model)
            if self._memory is not None:
                self._make_room(await asyncio.to_thread(_measured, list(self)), self._memory)

    def _make_room(self, used: int, most: int) -> None:
        """Lets the models rest that were not used for longest, until the rest fits."""
        resting = sum(model.memory for model in self._resting)
        for model in sorted(self, key=lambda candidate: candidate.used):
            if used - resting <= most:
                return
            if self._rest(model):
                resting += model.memory
                logger.info(
                    "%s gives its memory back: all workers take %d MB, more than --memory", model.label, used // 10**6
                )

    def _rest(self, model: ServedArchive) -> bool:
        """Lets a model rest if it is loaded, and nobody waits for it."""
        if model.state != "READY" or model.is_busy or model in self._resting:
            return False
        self._resting.add(model)

        async def rest() -> None:
            try:
                await model.rest()
            finally:
                self._resting.discard(model)

        background(rest(), self._tasks)
        return True

    def wake(self, model: ServedArchive) -> None:
        """Makes room for a model whose workers start again, by what they had when they ended."""
        if self._memory is not None and model.state == "idle":
            # One that goes to rest still has its memory, which `_make_room` subtracts.
            held = [other for other in self if other.state == "READY" or other in self._resting]
            others = sum(other.memory for other in held if other is not model)
            self._make_room(others + model.memory, self._memory)


def _measured(models: list[ServedArchive]) -> int:
    return sum(model.measure() for model in models)
