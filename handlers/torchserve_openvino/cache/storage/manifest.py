"""Manifests: one canonical JSON file per entry, with a checksum that is verified before anything else.

The file is ``{"checksum":"<64 hex digits>",REST}``, where the checksum is that of ``{REST}``. Later schemas keep this
frame, so that an older reader can tell a newer schema from a damaged file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

from blake3 import blake3

from torchserve_openvino.errors import DamagedEntryError

Kind = Literal["call", "partition", "blob", "precision", "placement", "generator", "proof", "verdict"]

SCHEMA = 1
KINDS: tuple[str, ...] = get_args(Kind)
MAX_BYTES = 64 * 2**20
HEX = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[a-z0-9._-]{1,64}")
# Any digest in a manifest, whatever its schema: enough to know which objects it needs.
_ANY_DIGEST = re.compile(rb'"([0-9a-f]{64})"')

_HEAD = b'{"checksum":"'
_HEAD_BYTES = len(_HEAD) + 64 + len(b'",')
_KEYS = {"schema", "kind", "key", "fields", "body", "files", "created"}


class ForeignSchemaError(Exception):
    """An intact manifest with another schema version."""


class FileRef(NamedTuple):
    """A file of an entry: its blake3 digest in hexadecimal, and its size in bytes."""

    digest: str
    bytes: int


class FileSource(Protocol):
    """Source from which an entry reads its files."""

    def read_file(self, entry: "Entry", name: str) -> bytes:
        """Returns the verified content of a file."""
        ...

    def file_path(self, entry: "Entry", name: str) -> Path:
        """Verifies a file and returns its path."""
        ...


@dataclass(frozen=True)
class Entry:
    """A stored entry. Its manifest has been verified; each file is verified when it is read.

    Attributes:
        kind: What it is; see `cache.identity.key`.
        key: 64 hexadecimal digits.
        fields: Fields from which the key was made, for diagnosis.
        body: Stored content, JSON.
        files: Digest and size of each file.
        created: When it was written, UTC, ISO 8601.
    """

    kind: str
    key: str
    fields: Mapping[str, Any]
    body: Mapping[str, Any]
    files: Mapping[str, FileRef]
    created: str = ""
    _source: FileSource | None = field(default=None, repr=False, compare=False)

    def read(self, name: str) -> bytes:
        """Returns the content of a file; exactly these bytes were verified.

        Raises:
            DamagedEntryError: The file is missing, damaged or unreadable. The entry is then removed, or will be a miss.
        """
        return self._files_from().read_file(self, name)

    def path(self, name: str) -> Path:
        """Returns the path of a file that was just verified, for APIs that need a path. Must not be written to.

        Another process may evict the entry before the file is opened.

        Raises:
            DamagedEntryError: As for `read`.
        """
        return self._files_from().file_path(self, name)

    def _files_from(self) -> FileSource:
        if self._source is None:
            raise DamagedEntryError(f"{label(self.kind, self.key)} belongs to no store")
        return self._source


def label(kind: str, key: str) -> str:
    """Returns an entry's name for messages."""
    return f"{kind} {key[:12]}"


def check_name(kind: str, key: str) -> None:
    """Raises ValueError for an invalid kind or key."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if not isinstance(key, str) or not HEX.fullmatch(key):
        raise ValueError(f"a key is 64 hexadecimal digits, not {key!r}")


def check_file_name(name: str) -> None:
    """Raises ValueError for an invalid name of an entry's file."""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise ValueError(f"a file's name is 1 to 64 of a-z, 0-9, '.', '_' and '-', not {name!r}")


def canonical(value: Any) -> bytes:
    """Serializes a value to ASCII JSON with sorted keys and no spaces.

    Raises:
        TypeError, ValueError: It is not JSON: another type, a key that cannot become text, NaN, infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping as it will be read back: tuples as lists, keys as text. Raises as `canonical`."""
    return json.loads(canonical(dict(value)))


def encode(record: Mapping[str, Any]) -> bytes:
    """Returns the content of a manifest file: a record with its checksum."""
    rest = canonical(dict(record))
    return _HEAD + blake3(rest).hexdigest().encode() + b'",' + rest[1:]


def record_of(entry: Entry) -> dict[str, Any]:
    """Returns the record of an entry, for `encode`."""
    files = {name: {"digest": ref.digest, "bytes": ref.bytes} for name, ref in entry.files.items()}
    return {
        "schema": SCHEMA,
        "kind": entry.kind,
        "key": entry.key,
        "fields": entry.fields,
        "body": entry.body,
        "files": files,
        "created": entry.created,
    }


def decode(data: bytes, kind: str, key: str, source: FileSource | None = None) -> Entry:
    """Returns the entry of a manifest file.

    Args:
        data: Content of the file.
        kind: Kind that it must have, from the file's folder.
        key: Key that it must have, from the file's name.
        source: Where the entry reads its files.

    Raises:
        ForeignSchemaError: It is intact, but has another schema.
        DamagedEntryError: It is not an intact manifest of this kind and key.
    """
    record = _checked(data)
    if record.get("schema") != SCHEMA:
        raise ForeignSchemaError(f"schema {record.get('schema')!r}, not {SCHEMA}")
    if set(record) != _KEYS:
        raise DamagedEntryError(f"the manifest has the wrong keys {sorted(record)}")
    if record["kind"] != kind or record["key"] != key:
        raise DamagedEntryError(f"the manifest belongs to {record['kind']!r} {record['key']!r}")
    if not isinstance(record["fields"], dict) or not isinstance(record["body"], dict):
        raise DamagedEntryError("fields and body are not JSON objects")
    if not isinstance(record["created"], str):
        raise DamagedEntryError("created is not text")
    files = _files(record["files"])
    return Entry(kind, key, record["fields"], record["body"], files, record["created"], source)


def _checked(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise DamagedEntryError(f"the manifest has {len(data)} bytes, more than {MAX_BYTES}")
    stated, comma = data[len(_HEAD) : len(_HEAD) + 64], data[len(_HEAD) + 64 : _HEAD_BYTES]
    digest = blake3(b"{")
    digest.update(memoryview(data)[_HEAD_BYTES:])
    if not data.startswith(_HEAD) or comma != b'",' or digest.hexdigest().encode() != stated:
        raise DamagedEntryError("the manifest does not match its checksum")
    try:
        # What can't be written again, as NaN and Infinity can't, is not read either.
        record = json.loads(b"{" + data[_HEAD_BYTES:], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedEntryError(f"the manifest is not valid JSON: {error}") from error
    return record


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def _files(value: Any) -> dict[str, FileRef]:
    if not isinstance(value, dict):
        raise DamagedEntryError("files is not a JSON object")
    files = {}
    for name, ref in value.items():
        if not FILE_NAME.fullmatch(name):
            raise DamagedEntryError(f"{name[:80]!r} cannot be the name of a file")
        size = ref.get("bytes") if isinstance(ref, dict) else None
        digest = ref.get("digest") if isinstance(ref, dict) else None
        if not isinstance(digest, str) or not HEX.fullmatch(digest) or set(ref) != {"digest", "bytes"}:
            raise DamagedEntryError(f"file {name!r} has no valid digest")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise DamagedEntryError(f"file {name!r} has no valid size")
        files[name] = FileRef(digest, size)
    return files


def digests_in(data: bytes) -> set[str]:
    """Returns the digests in a manifest of any schema, even a damaged one; not all need to be those of its files."""
    return {digest.decode("ascii") for digest in _ANY_DIGEST.findall(data)}
