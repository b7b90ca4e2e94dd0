"""From settings to the store that a model uses."""

from dataclasses import dataclass
from pathlib import Path

from torchserve_openvino.cache.layers import Layers
from torchserve_openvino.cache.store import LIMIT_BYTES, Store

# Where `torchserve-openvino package` puts entries into a model archive.
PACKAGED_FOLDER = "torchserve-openvino-cache"


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
    """

    limit_bytes: int = LIMIT_BYTES
    lock_seconds: float = 600.0
    packaged: Path | None = None
    proves: bool = True
    for_level: bool = False


def open_cache(directory: str | None, settings: CacheSettings) -> Layers | None:
    """The store of a model; None where there is neither a folder nor packaged entries.

    Args:
        directory: Folder of the cache; None while ``model_caching`` is off.
        settings: Everything else.

    Raises:
        CacheDirectoryError: The folder belongs to another user, or others may write to it.
    """
    primary = None
    if directory is not None:
        primary = Store(Path(directory), limit_bytes=settings.limit_bytes, lock_seconds=settings.lock_seconds)
    extra = []
    if settings.packaged is not None and settings.packaged.is_dir():
        extra.append(Store(settings.packaged, writable=False, private=False))
    return Layers(primary, extra) if primary is not None or extra else None
