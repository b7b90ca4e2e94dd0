"""A store whose entries other machines have, too: a folder here, and a copy of each entry in object storage.

An entry that is missing here is fetched by its key, a digest of all that it depends on; one that is stored here is sent
there, as a bundle (`bundle.py`), whose names, sizes and checksums are verified on the way in, and which can write no
other entry. Object storage has no
locks: machines that start at the same moment may compile the same, and send equal content. Storage that can't be
reached costs a warning for each reason, and is counted, never an answer.
"""

import logging
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchserve_openvino.cache.storage import bundle
from torchserve_openvino.cache.storage.manifest import Entry, Kind, check_name
from torchserve_openvino.cache.storage.objects import Source
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import CacheDirectoryError

logger = logging.getLogger(__name__)


def is_remote(directory: str) -> bool:
    """Whether a ``cache_dir`` is in object storage, such as ``s3://bucket/folder``."""
    return "://" in directory


def local_folder(url: str, root: Path) -> Path:
    """Returns the folder below ``root`` in which this machine keeps the entries of a URL."""
    return root / f"remote-{blake3(url.encode()).hexdigest(length=8)}"


class RemoteStore(Store):
    """A store with a copy of its entries in object storage.

    Args:
        root: Folder on this machine.
        url: Where the copies are, for fsspec.
        options: As for `Store`.

    Raises:
        CacheDirectoryError: fsspec, or what it needs for this kind of URL, is not installed.
    """

    def __init__(self, root: Path, url: str, **options: Any) -> None:
        super().__init__(root, **options)
        # Imported here: only this store needs it.
        try:
            import fsspec

            self._files, self._base = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            kind = url.partition(":")[0]
            raise CacheDirectoryError(f"cache_dir {url}: {error}. pip install 'fsspec[{kind}]'") from error
        self._url = url
        # Entries that are wrong, until they are stored anew.
        self._discarded: set[tuple[str, str]] = set()

    def get(self, kind: Kind | str, key: str) -> Entry | None:
        """Returns an entry as `Store.get` does, after looking for it in object storage if it is not here."""
        check_name(kind, key)
        is_fetched = self.writable and (kind, key) not in self._discarded
        if is_fetched and not any(reader.path_of(kind, key).exists() for reader in self._readers):
            self._fetch(kind, key)
        return super().get(kind, key)

    def put(
        self,
        kind: Kind | str,
        key: str,
        *,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Mapping[str, Source] | None = None,
    ) -> Entry | None:
        """Stores an entry here, and sends it."""
        entry = super().put(kind, key, fields=fields, body=body, files=files)
        if entry is not None:
            self._discarded.discard((kind, key))
            self._send(kind, key)
        return entry

    def discard(self, kind: Kind | str, key: str) -> None:
        """Removes an entry here, and does not fetch it again; a new one replaces the copy in object storage."""
        super().discard(kind, key)
        self._discarded.add((kind, key))

    def _place(self, kind: str, key: str) -> str:
        return f"{self._base.rstrip('/')}/{kind}/{key}.tar"

    def _fetch(self, kind: str, key: str) -> None:
        remote_path = self._place(kind, key)
        with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
            path = Path(folder) / "entry.tar"
            try:
                # Not `exists`, which takes any error for an answer.
                if (size := self._files.size(remote_path)) > self.limit_bytes:
                    self._write_failed(f"{self._url}: an entry of {size} bytes is larger than cache.limit_gb allows")
                    return
                self._files.get_file(remote_path, str(path))
                moved = bundle.import_(self, path, only=(kind, key))
            except FileNotFoundError:
                return
            except Exception as error:
                # Each library behind fsspec has errors of its own.
                self._write_failed(f"{self._url} cannot be read: {type(error).__name__}: {error}")
                return
        if moved.problems:
            self._write_failed(f"{self._url} has a damaged entry: {moved.problems[0]}")
        elif not moved.entries:
            self._write_failed(f"{self._url} has an empty bundle in place of {kind} {key[:8]}")
        else:
            logger.info("Fetched %s %s from %s", kind, key[:8], self._url)

    def _send(self, kind: str, key: str) -> None:
        remote_path = self._place(kind, key)
        # Visible at once and whole: object storage does that by itself, a file system by renaming.
        draft = f"{remote_path}.{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
            path = Path(folder) / "entry.tar"
            try:
                bundle.export(self, path, [key], kind=kind)
                self._files.makedirs(remote_path.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(path), draft)
                self._files.mv(draft, remote_path)
            except Exception as error:
                self._write_failed(f"{self._url} cannot be written: {type(error).__name__}: {error}")
