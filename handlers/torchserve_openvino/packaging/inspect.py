"""Predicts whether an archive starts warm on this machine, and if not, why, without running any of its code."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.identity.versions import python_version, versions
from torchserve_openvino.cache.open import PACKAGED_FOLDER
from torchserve_openvino.cache.storage.store import Entry, Problem, Store
from torchserve_openvino.files.json_text import read_json, read_json_object
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.packaging.precompile import CONTENTS, GUARDED, contents
from torchserve_openvino.serving.loading.archive_manifest import model_of


@dataclass
class Inspection:
    """What `inspect` found.

    Attributes:
        start: ``warm`` (nothing is traced or compiled), ``from IR`` (compiled, not traced) or ``cold``.
        calls: Number of input signatures that start without tracing.
        partitions: Number of subgraphs that these calls use.
        compiled: Number of these subgraphs that are compiled for this machine.
        model: The section ``model`` of the archive's manifest.
        reasons: Why it does not start warm; empty if it does.
    """

    start: str = "cold"
    calls: int = 0
    partitions: int = 0
    compiled: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes, JSON-safe."""
        return dict(vars(self))


def inspect(path: Path) -> Inspection:
    """Inspects an archive.

    Raises:
        PackagingError: It is not a model archive.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        folder = Path(scratch)
        extract(path, folder)
        verdict = Inspection(model=model_of(folder))
        if not (folder / PACKAGED_FOLDER).is_dir():
            verdict.reasons.append(
                "it contains no compiled graphs; make it with `torchserve-openvino package --precompile`, or let "
                "model_caching keep them after the first start"
            )
            return verdict
        _judge(folder, Store(folder / PACKAGED_FOLDER, writable=False, private=False), verdict)
        return verdict


def _judge(folder: Path, store: Store, verdict: Inspection) -> None:
    damaged = store.verify()
    verdict.reasons += [f"damaged: {problem.reason}" for problem in damaged]
    changed = _changed(folder)
    verdict.reasons += changed
    entries = list(store.entries())
    calls = [entry for entry in entries if entry.kind == "call"]
    exported = [entry for entry in entries if entry.kind == "generator"]
    environment = {**versions(), "python": python_version()}
    foreign = _differences([entry.fields for entry in calls], environment) + _changed_passes(calls)
    foreign += _differences([entry.fields for entry in exported], versions())
    verdict.reasons += foreign
    verdict.calls = len(calls)
    keys = set()
    for entry in calls:
        try:
            keys |= _partitions(entry)
        except ValueError as error:
            verdict.reasons.append(f"damaged: call {entry.key[:12]}: {' '.join(str(error).split())[:200]}")
            damaged = [*damaged, Problem("call", entry.key, "it has other types")]
    verdict.partitions = len(keys)
    verdict.compiled = len(keys & _compiled_here(entries))
    if exported and not calls:
        if not verdict.reasons:
            verdict.start = "from IR"
            verdict.reasons.append("OpenVINO GenAI compiles an exported language model at each start, without tracing")
        return
    if not calls:
        verdict.reasons += [f"every start traces the model: {reason}" for reason in _guarded(folder)]
    if damaged or changed or foreign or not calls:
        return
    verdict.start = "warm" if verdict.compiled == len(keys) else "from IR"
    if verdict.start == "from IR":
        verdict.reasons.append(
            f"{len(keys) - verdict.compiled} of {len(keys)} partitions are not compiled for this machine's CPU; they "
            "are compiled from their IR, without tracing (package with --level for other CPUs)"
        )


def _partitions(entry: Entry) -> set[str]:
    # Imported here, as in `_compiled_here`.
    from torchserve_openvino.backend.routes.call_entry import read_call

    return {part.key for part in read_call(entry.body).parts}


def _changed(folder: Path) -> list[str]:
    try:
        stored = read_json_object(folder / PACKAGED_FOLDER / CONTENTS)
    except (OSError, ValueError):
        return [f"{CONTENTS} is missing or damaged: it is unknown whether the model is the one that was compiled"]
    now = contents(folder)
    names = sorted(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
    return [f"changed since it was compiled: {', '.join(names)}"] if names else []


def _guarded(folder: Path) -> list[str]:
    """Returns the reasons stored when the archive was compiled; a general one if they cannot be read."""
    try:
        return [str(reason) for reason in read_json(folder / PACKAGED_FOLDER / GUARDED)]
    except (OSError, ValueError, TypeError):
        return ["the model has graph breaks, keeps state, or is not frozen (handler.openvino.freeze)"]


def _differences(fields: list[Mapping[str, Any]], environment: Mapping[str, Any]) -> list[str]:
    differences: dict[str, None] = {}
    for stored in fields:
        for name, value in environment.items():
            if stored.get(name) != value:
                differences[f"{name}: compiled with {stored.get(name)}, but this machine has {value}"] = None
    return list(differences)


def _changed_passes(calls: list[Entry]) -> list[str]:
    """Returns which passes differ between this version and that of the entries."""
    from torchserve_openvino.passes.digests import graph_passes

    current = set(graph_passes())
    names = {
        str(digest).partition(" ")[0] for entry in calls for digest in current ^ set(entry.fields.get("passes", ()))
    }
    return [f"passes: compiled with other versions of {', '.join(sorted(names))}"] if names else []


def _compiled_here(entries: list[Entry]) -> set[Any]:
    """Returns the keys of the partitions that have a blob for this machine."""
    from torchserve_openvino.backend.routes.partition_cache import fits_here

    return {e.fields.get("partition") for e in entries if e.kind == "blob" and fits_here(e.fields)}
