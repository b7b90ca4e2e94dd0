"""The frontend's archive in an installed TorchServe: its state, patched in place, and back."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from torchserve_openvino.errors import FrontendError
from torchserve_openvino.files.atomic import AtomicFile
from torchserve_openvino.files.json_text import parse_json
from torchserve_openvino.files.zip_bounds import UNREADABLE, read_member
from torchserve_openvino.frontend.patches import CLASSES, is_faulty, patched

State = Literal["faulty", "patched", "outdated", "unknown"]
# What patches it.
COMMAND = "torchserve-openvino frontend --patch"
# Where the archive keeps the classes that were replaced.
_KEPT = "META-INF/torchserve-openvino"
# New members come behind the old ones, in place of the list at the end. With that list the file is as it was, byte for
# byte: so the end is kept, and where it belongs, with the digest of the whole.
_END, _WHOLE = f"{_KEPT}/end", f"{_KEPT}/original.json"


class Frontend:
    """An archive ``model-server.jar``.

    Args:
        path: The archive; a link stays one, since the file that it leads to is replaced.

    Raises:
        FrontendError: It can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                self._seen = _identity(os.fstat(file.fileno()))
                names = set(archive.namelist())
                self._now = {name: read_member(archive, name) for name in CLASSES if name in names}
                originals = {name: read_member(archive, _kept(name)) for name in CLASSES if _kept(name) in names}
        except (ValueError, *UNREADABLE) as error:
            raise FrontendError(f"{path} can't be read: {error}") from error
        self._original = {**self._now, **originals}
        self._is_changed = bool(originals)

    @classmethod
    def installed(cls) -> Frontend:
        """Returns that of the installed TorchServe. Raises FrontendError if there is none, or it can't be read."""
        spec = importlib.util.find_spec("ts")
        if spec is None or spec.origin is None:
            raise FrontendError("TorchServe is not installed here: pip install torchserve.")
        return cls(Path(spec.origin).parent / "frontend" / "model-server.jar")

    @property
    def state(self) -> State:
        """What is known of it.

        ``faulty`` as TorchServe 0.12 comes, ``patched``, ``outdated`` if another version of this package patched it,
        or ``unknown`` for another version of TorchServe.
        """
        if not self._is_known():
            return "unknown"
        if self._now == self._original:
            return "faulty"
        return "patched" if self._now == self.patched_classes() else "outdated"

    def _is_known(self) -> bool:
        return all(is_faulty(name, self._original.get(name, b"")) for name in CLASSES)

    def patched_classes(self) -> dict[str, bytes]:
        """Returns the patched class files by their paths. Raises FrontendError for another version."""
        if not self._is_known():
            raise FrontendError(f"{self.path} is not TorchServe 0.12.0's; only that can be patched.")
        return {name: patched(name, self._original[name]) for name in CLASSES}

    def patch(self) -> bool:
        """Patches the archive in place, for servers that are started from now on; does nothing if it is patched.

        Returns:
            Whether it was faulty, or patched by another version.

        Raises:
            FrontendError: It is of another version, was replaced since it was read, or can't be written; it is as it
                was then.
        """
        patched = self.patched_classes()
        if self._now == patched:
            return False
        if self._is_changed:
            self.undo()
        originals = {_kept(name): data for name, data in self._original.items()}
        self._replace(lambda file: _add(file, {**patched, **originals}))
        self._now, self._is_changed = patched, True
        return True

    def undo(self) -> bool:
        """Puts TorchServe's own classes back: the file is then as it was, byte for byte.

        Returns:
            Whether it was patched.

        Raises:
            FrontendError: As of `patch`, or what is kept of the original is damaged.
        """
        if not self._is_changed or not self._is_known():
            return False
        self._replace(self._restore)
        self._now, self._is_changed = self._original, False
        return True

    def _restore(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            if not {_END, _WHOLE} <= names:
                # Of an earlier version, which kept the classes alone.
                originals = [name for name in names if name.startswith(f"{_KEPT}/")]
                end, whole = None, {}
            else:
                end, whole = read_member(archive, _END), parse_json(read_member(archive, _WHOLE))
        if end is None:
            _append(file, self._original, without=originals)
            return
        try:
            start, digest = int(whole["end_at"]), str(whole["sha256"])
        except (KeyError, TypeError, ValueError) as error:
            raise FrontendError(f"{self.path} holds no valid {_WHOLE}: install torchserve again.") from error
        file.seek(start)
        file.truncate()
        file.write(end)
        if _digest(file) != digest:
            raise FrontendError(
                f"{self.path} was changed since it was patched, and can't be put back: install torchserve again."
            )

    def _replace(self, change: Callable[[BinaryIO], None]) -> None:
        """Changes a copy of the archive, and puts it in the archive's place, with its owner and permissions."""
        real = self.path.resolve()
        try:
            with real.open("rb") as source:
                status = os.fstat(source.fileno())
                self._check_same(status)
                if hasattr(os, "geteuid") and os.geteuid() not in (0, status.st_uid):
                    raise PermissionError(f"it belongs to user {status.st_uid}")
                with AtomicFile(real, like=status) as draft:
                    shutil.copyfileobj(source, draft.file, 2**20)
                    change(draft.file)
                    self._check_same(real.stat())
                    draft.commit()
            self._seen = _identity(real.stat())
        except (ValueError, *UNREADABLE) as error:
            raise FrontendError(f"{self.path} can't be written ({error}); do it as the user who owns it.") from error

    def _check_same(self, status: os.stat_result) -> None:
        if _identity(status) != self._seen:
            raise FrontendError(f"{self.path} was replaced meanwhile, as by pip: run the command again.")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _add(file: BinaryIO, files: Mapping[str, bytes]) -> None:
    """Replaces and adds members, and keeps what is needed to take them out again."""
    digest = _digest(file)
    with zipfile.ZipFile(file) as archive:
        start = archive.start_dir
    file.seek(start)
    end = file.read()
    whole = json.dumps({"end_at": start, "sha256": digest}).encode()
    _append(file, {**files, _END: end, _WHOLE: whole})


def _append(file: BinaryIO, files: Mapping[str, bytes], without: Iterable[str] = ()) -> None:
    """Writes members behind the others, which are not written anew."""
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        for name in [*files, *without]:
            # What is not in the list at an archive's end is not in the archive.
            if (old := archive.NameToInfo.pop(name, None)) is not None:
                archive.filelist.remove(old)
        for name, data in files.items():
            archive.writestr(name, data)


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


def _kept(name: str) -> str:
    return f"{_KEPT}/{name}"
