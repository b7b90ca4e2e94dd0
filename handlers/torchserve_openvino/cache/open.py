"""Opens the store that a model uses, according to its settings."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage.directory import open_root
from torchserve_openvino.cache.storage.remote import RemoteStore, is_remote, local_folder
from torchserve_openvino.cache.storage.store import LIMIT_BYTES, Store
from torchserve_openvino.config.options import cache_root
from torchserve_openvino.errors import CacheDirectoryError

logger = logging.getLogger(__name__)

# Where `torchserve-openvino package` puts entries into a model archive.
PACKAGED_FOLDER = "torchserve-openvino-cache"
# Prefix of folders that workers create in an unpacked archive; they are not part of the archive.
WORKERS_PREFIX = ".torchserve-openvino-"
# Environment variables that tell a worker started by `torchserve-openvino package --precompile` where and how to store.
PRECOMPILE_ENV = "TORCHSERVE_OPENVINO_PRECOMPILE"
FOR_LEVEL_ENV = "TORCHSERVE_OPENVINO_PRECOMPILE_FOR_LEVEL"
# Environment variable with the folder for what is compiled at the moment, in place of `JOURNAL_FOLDER` in the cache.
STATE_ENV = "TORCHSERVE_OPENVINO_STATE_DIR"
JOURNAL_FOLDER = "compiling"
_STATE_FOLDER = "torchserve-openvino"
# Creation date of packaged entries, fixed so that the same content gives the same archive.
_PACKAGED_DATE = "1980-01-01T00:00:00+00:00"


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the cache beyond the options ``model_caching`` and ``cache_dir``.

    Attributes:
        limit_bytes: Maximum total size of all entries.
        lock_seconds: How long to wait for another process that is compiling the same model.
        packaged: Folder of the entries in the model archive; never written.
        proves: Whether the result of a cached call is compared with eager PyTorch's before it is used; False where
            the caller compares them.
        for_level: Whether compiled models are stored for any CPU with this one's instruction set.
        directory: Folder to use instead of ``cache_dir``, whether or not ``model_caching`` is on.
        created: Creation date to record in entries, instead of the current time.
    """

    limit_bytes: int = LIMIT_BYTES
    lock_seconds: float = 600.0
    packaged: Path | None = None
    proves: bool = True
    for_level: bool = False
    directory: Path | None = None
    created: str | None = None

    def while_packaging(self, env: Mapping[str, str]) -> "CacheSettings":
        """Returns these settings, or those of a worker that fills an archive's cache if `PRECOMPILE_ENV` is set."""
        folder = env.get(PRECOMPILE_ENV)
        if not folder:
            return self
        level = bool(env.get(FOR_LEVEL_ENV))
        return replace(self, directory=Path(folder), created=_PACKAGED_DATE, packaged=None, for_level=level)


def open_cache(directory: str | None, settings: CacheSettings) -> Store | None:
    """Opens the store of a model; returns None if there is neither a cache folder nor packaged entries.

    Args:
        directory: Folder of the cache; None while ``model_caching`` is off.
        settings: All other settings.

    Raises:
        CacheDirectoryError: The folder belongs to another user, others may write to it, or fsspec has no such URLs.
    """
    remote = directory if settings.directory is None and directory is not None and is_remote(directory) else None
    folder = settings.directory or (Path(directory) if directory is not None else None)
    packaged = settings.packaged if settings.packaged is not None and settings.packaged.is_dir() else None
    if folder is None:
        return Store(packaged, writable=False, private=False) if packaged is not None else None
    options: dict[str, Any] = {
        "limit_bytes": settings.limit_bytes,
        "lock_seconds": settings.lock_seconds,
        "packaged": packaged,
        "created": settings.created,
    }
    if remote is not None:
        return RemoteStore(local_folder(remote, cache_root()), remote, **options)
    return Store(folder, **options)


def state_folder(store: Store | None, env: Mapping[str, str] | None = None) -> Path | None:
    """Returns a folder for what must outlive a process that dies: private, and created if absent.

    That is the first of these which can be written: the one that `STATE_ENV` names, one in the cache, which the
    workers of a model share, the user's state folder, one in the folder for temporary files.

    Args:
        store: The cache; None without.
        env: Environment variables; ``os.environ`` if None.
    """
    env = os.environ if env is None else env
    for folder in _state_folders(store, env):
        try:
            root = open_root(folder, writable=True)
        except CacheDirectoryError as error:
            logger.warning("A death while compiling is not noted there: %s", error)
            continue
        if root.why_read_only is None:
            return root.path
    logger.warning("A death while compiling goes unnoticed: no folder for it can be written; set %s", STATE_ENV)
    return None


def _state_folders(store: Store | None, env: Mapping[str, str]) -> Iterator[Path]:
    if named := env.get(STATE_ENV, "").strip():
        yield Path(named).expanduser()
        return
    if store is not None and store.writable:
        yield store.root / JOURNAL_FOLDER
    base = Path(env.get("XDG_STATE_HOME", ""))
    # A user without a home, as in some containers.
    with contextlib.suppress(RuntimeError):
        yield (base if base.is_absolute() else Path("~/.local/state").expanduser()) / _STATE_FOLDER / JOURNAL_FOLDER
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    yield Path(tempfile.gettempdir()) / f"{_STATE_FOLDER}-{user}"
