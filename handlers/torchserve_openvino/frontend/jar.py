"""The frontend's archive in an installed TorchServe: its state, mended in place, and back."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from torchserve_openvino.errors import FrontendError
from torchserve_openvino.frontend.mending import CLASSES, is_faulty, mended

State = Literal["faulty", "mended", "unknown"]
# What mends it.
COMMAND = "torchserve-openvino frontend --mend"
# Where the archive keeps the classes that were replaced.
_KEPT = "META-INF/torchserve-openvino"


class Frontend:
    """An archive ``model-server.jar``.

    Args:
        path: The archive.

    Raises:
        FrontendError: It can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                names = set(archive.namelist())
                self._now = {name: archive.read(name) for name in CLASSES if name in names}
                kept = {name: archive.read(_kept(name)) for name in CLASSES if _kept(name) in names}
        except (OSError, zipfile.BadZipFile) as error:
            raise FrontendError(f"{path} can't be read: {error}") from error
        self._original = {**self._now, **kept}

    @classmethod
    def installed(cls) -> Frontend:
        """Returns that of the installed TorchServe. Raises FrontendError if there is none, or it can't be read."""
        found = importlib.util.find_spec("ts")
        if found is None or found.origin is None:
            raise FrontendError("TorchServe is not installed here: pip install torchserve.")
        return cls(Path(found.origin).parent / "frontend" / "model-server.jar")

    @property
    def state(self) -> State:
        """``faulty`` as TorchServe 0.12 comes, ``mended``, or ``unknown`` for another version."""
        if not self._is_known():
            return "unknown"
        if self._now == self._original:
            return "faulty"
        return "mended" if self._now == self.mended_classes() else "unknown"

    def _is_known(self) -> bool:
        return all(is_faulty(name, self._original.get(name, b"")) for name in CLASSES)

    def mended_classes(self) -> dict[str, bytes]:
        """Returns the mended class files by their paths. Raises FrontendError for another version."""
        if not self._is_known():
            raise FrontendError(f"{self.path} is not TorchServe 0.12.0's; only that can be mended.")
        return {name: mended(name, self._original[name]) for name in CLASSES}

    def mend(self) -> bool:
        """Mends the archive in place, for servers that are started from now on; does nothing if it is mended.

        Returns:
            Whether it was faulty.

        Raises:
            FrontendError: It is of another version, or can't be written; it is as it was then.
        """
        made = self.mended_classes()
        if self._now == made:
            return False
        self._write({**made, **{_kept(name): data for name, data in self._original.items()}})
        self._now = made
        return True

    def undo(self) -> bool:
        """Puts TorchServe's own classes back. Returns whether it was mended. Raises FrontendError as `mend` does."""
        if self.state != "mended":
            return False
        self._write(self._original, without=map(_kept, CLASSES))
        self._now = self._original
        return True

    def _write(self, files: Mapping[str, bytes], without: Iterable[str] = ()) -> None:
        """Replaces files of the archive; the others are not written anew."""
        try:
            with tempfile.TemporaryDirectory(prefix=".mending-", dir=self.path.parent) as folder:
                made = Path(folder) / self.path.name
                shutil.copy2(self.path, made)
                with zipfile.ZipFile(made, "a", zipfile.ZIP_DEFLATED) as archive:
                    for name in [*files, *without]:
                        # What is not in the list at an archive's end is not in the archive.
                        if (old := archive.NameToInfo.pop(name, None)) is not None:
                            archive.filelist.remove(old)
                    for name, data in files.items():
                        archive.writestr(name, data)
                made.replace(self.path)
        except OSError as error:
            raise FrontendError(f"{self.path} can't be written ({error}); do it as the user who owns it.") from error


def _kept(name: str) -> str:
    return f"{_KEPT}/{name}"
