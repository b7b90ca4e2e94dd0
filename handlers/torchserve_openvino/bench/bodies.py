"""Request bodies from a folder."""

import mimetypes
from dataclasses import dataclass
from pathlib import Path

from torchserve_openvino.errors import ConfigError

# Python's table lacks these, or names others than TorchServe's clients send.
_TYPES = {".npy": "application/octet-stream", ".json": "application/json", ".txt": "text/plain", ".webp": "image/webp"}
_UNKNOWN = "application/octet-stream"


@dataclass(frozen=True)
class Body:
    """One request.

    Attributes:
        path: The file whose content is sent.
        content_type: Its type.
    """

    path: Path
    content_type: str

    @property
    def named(self) -> tuple[str, str]:
        """The file's path with the content type, as a `Plan` has it."""
        return str(self.path), self.content_type

    @property
    def data(self) -> bytes:
        """The content."""
        return self.path.read_bytes()


def read_folder(folder: Path) -> list[Body]:
    """Returns the files of a folder as requests, by name; the suffix decides the content type.

    Raises:
        ConfigError: The folder is missing or holds no file, or a file is empty.
    """
    if not folder.is_dir():
        raise ConfigError(
            "is no folder; give one with a request body in each file.", location=str(folder), key="requests"
        )
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise ConfigError("holds no file; put a request body into each.", location=str(folder), key="requests")
    if empty := [path.name for path in paths if not path.stat().st_size]:
        raise ConfigError(
            f"{empty[0]} is empty, and no request has an empty body.", location=str(folder), key="requests"
        )
    return [Body(path, content_type(path)) for path in paths]


def suffix_of(content_type: str) -> str:
    """Returns a suffix by which `content_type` finds a type again; ``.bin`` for one that it does not know."""
    known = {kind: suffix for suffix, kind in _TYPES.items() if kind != _UNKNOWN}
    return known.get(content_type) or mimetypes.guess_extension(content_type) or ".bin"


def content_type(path: Path) -> str:
    """Returns the content type of a file by its suffix."""
    suffix = path.suffix.lower()
    return _TYPES.get(suffix) or mimetypes.types_map.get(suffix, _UNKNOWN)
