"""From settings to the store that a model uses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchserve_openvino.cache.storage.store import LIMIT_BYTES, Store

# Where `torchserve-openvino package` puts entries into a model archive.
PACKAGED_FOLDER = "torchserve-openvino-cache"
# How folders begin that workers make in an unpacked archive, and that are none of its own.
WORKERS_PREFIX = ".torchserve-openvino-"
# How `torchserve-openvino package --precompile` tells the worker that it starts where to store.
PRECOMPILE_ENV = "TORCHSERVE_OPENVINO_PRECOMPILE"
FOR_LEVEL_ENV = "TORCHSERVE_OPENVINO_PRECOMPILE_FOR_LEVEL"
# The date of packaged entries: the same content shall give the same archive.
_PACKAGED_DATE = "1980-01-01T00:00:00+00:00"


@dataclass(frozen=True)
class CacheSettings:
    """More about the cache than OpenVINO's own options say.

    Attributes:
        limit_bytes: Size that all entries may have together.
        lock_seconds: How long to wait for another process that compiles the same.
        packaged: Folder of entries that came with the model archive; only read.
        proves: Whether the answer of a call from the cache is compared with eager PyTorch's before it is used; False
            where somebody else compares.
        for_level: Whether compiled models are stored for any CPU with this one's instruction set.
        directory: Folder instead of the options' ``cache_dir``, whether or not ``model_caching`` is on.
        created: Date that entries state, instead of now.
    """

    limit_bytes: int = LIMIT_BYTES
    lock_seconds: float = 600.0
    packaged: Path | None = None
    proves: bool = True
    for_level: bool = False
    directory: Path | None = None
    created: str | None = None

    def while_packaging(self, env: Mapping[str, str]) -> "CacheSettings":
        """These settings, or those of a worker that fills an archive's cache, where the environment says so."""
        folder = env.get(PRECOMPILE_ENV)
        if not folder:
            return self
        level = bool(env.get(FOR_LEVEL_ENV))
        return replace(self, directory=Path(folder), created=_PACKAGED_DATE, packaged=None, for_level=level)


def open_cache(directory: str | None, settings: CacheSettings) -> Store | None:
    """The store of a model; None where there is neither a folder nor packaged entries.

    Args:
        directory: Folder of the cache; None while ``model_caching`` is off.
        settings: Everything else.

    Raises:
        CacheDirectoryError: The folder belongs to another user, or others may write to it.
    """
    folder = settings.directory or (Path(directory) if directory is not None else None)
    packaged = settings.packaged if settings.packaged is not None and settings.packaged.is_dir() else None
    if folder is None:
        return Store(packaged, writable=False, private=False) if packaged is not None else None
    return Store(
        folder,
        limit_bytes=settings.limit_bytes,
        lock_seconds=settings.lock_seconds,
        packaged=packaged,
        created=settings.created,
    )
