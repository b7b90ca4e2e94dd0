"""Reads all of a store and says what is wrong with it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchserve_openvino.cache.storage.housekeeping import manifests, objects
from torchserve_openvino.cache.storage.manifest import Entry, FileRef, ForeignSchemaError
from torchserve_openvino.cache.storage.objects import Objects
from torchserve_openvino.errors import DamagedEntryError

Progress = Callable[[int, int], None]


class Problem(NamedTuple):
    """Something wrong.

    Attributes:
        kind: Kind of the entry; empty where it is about no entry.
        key: Its key; empty likewise.
        reason: What is wrong.
        path: The file that it is about; empty where it is about none.
    """

    kind: str
    key: str
    reason: str
    path: str = ""


def verify(
    root: Path, kept: Objects, load: Callable[[str, str], Entry], progress: Progress | None = None
) -> list[Problem]:
    """Checks each manifest, and each object once.

    Args:
        root: The store's folder.
        kept: Its objects.
        load: Gives the entry of a kind and key, or raises.
        progress: Called with bytes read and bytes to read.
    """
    problems, entries = [], []
    for found in manifests(root):
        try:
            entries.append(load(found.kind, found.key))
        except (FileNotFoundError, ForeignSchemaError):
            continue
        except (OSError, DamagedEntryError) as error:
            problems.append(Problem(found.kind, found.key, str(error), str(found.path)))
    there = objects(root)
    refs = {ref for entry in entries for ref in entry.files.values()}
    named = {ref.digest for ref in refs}
    refs |= {FileRef(digest, status.st_size) for digest, (_, status) in there.items() if digest not in named}
    total, done = sum(ref.bytes for ref in refs if ref.digest in there), 0
    wrong: dict[FileRef, str] = {}
    for ref in sorted(refs):
        try:
            kept.verify(ref)
        except FileNotFoundError:
            wrong[ref] = f"object {ref.digest[:12]} is missing"
        except (OSError, DamagedEntryError) as error:
            wrong[ref] = str(error)
        done += ref.bytes if ref.digest in there else 0
        if progress is not None:
            progress(done, total)
    for entry in entries:
        for name, ref in entry.files.items():
            if ref in wrong:
                place = str(kept.place(ref.digest))
                problems.append(Problem(entry.kind, entry.key, f"file {name!r}: {wrong[ref]}", place))
    for ref, reason in wrong.items():
        # One that vanished was an orphan that another process removed.
        if ref.digest not in named and os.path.lexists(kept.place(ref.digest)):
            problems.append(Problem("", "", f"{reason}, and no entry names it", str(kept.place(ref.digest))))
    return sorted(problems)
