"""Helpers shared by the store tests."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.storage.manifest import encode
from torchserve_openvino.cache.storage.store import Entry, Store

FIELDS = {"model": "net", "torch": "2.13"}
BODY = {"interface": [1, 2.5, None, "text"]}
FILES = {"model.xml": b"<net/>" * 50, "model.bin": bytes(range(256)) * 40}


def key(number: int) -> str:
    return f"{number:064x}"


def put(store: Store, number: int = 1, **changes: Any) -> Entry:
    entry = store.put("partition", key(number), **({"fields": FIELDS, "body": BODY, "files": FILES} | changes))
    assert entry is not None
    return entry


def manifest(store: Store, number: int = 1, kind: str = "partition") -> Path:
    return store.root / "entries" / kind / f"{key(number)}.json"


def object_of(store: Store, name: str = "model.bin", number: int = 1) -> Path:
    return store.objects.path_of(store.load("partition", key(number)).files[name].digest)


def content(entry: Entry | None) -> dict[str, bytes] | None:
    return None if entry is None else {name: entry.read(name) for name in entry.files}


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edits a manifest and recomputes its checksum, as a deliberate attacker would."""
    record = json.loads(path.read_bytes())
    del record["checksum"]
    record = change(record) or record
    path.write_bytes(encode(record))


@contextmanager
def child(code: str, *args: object) -> Iterator[subprocess.Popen]:
    """Runs code in a separate process, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)
