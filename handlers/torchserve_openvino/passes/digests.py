"""Digests of passes, for the keys of the cache.

A key names every pass that ran, not only those that changed the graph: a pass that is corrected may now change what it
left alone before, so an entry without its digest would be served stale. So a corrected pass voids the entries of all
graphs that went through its stage, and no others: one of the stage ``device`` voids compiled models whose properties
need it, but neither their IR nor their routes.

The digest of a pass covers the code of its file and of the files in `passes` that this one imports. What a pass
imports from other subpackages is part of every key (`cache.identity.versions`). Conditions are in the files of their
passes, so `lists.py` itself needs no digest: a key has the passes in their order.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.identity.code_walk import digest_of_files
from torchserve_openvino.passes.lists import FX_PASSES, OV_PASSES
from torchserve_openvino.passes.manager import due
from torchserve_openvino.passes.pass_context import PassContext

_ROOM = Path(__file__).resolve().parent
_IMPORT = re.compile(r"^\s*(?:from|import) torchserve_openvino\.passes\.([\w.]+)", re.MULTILINE)


def graph_passes() -> list[str]:
    """Returns name and digest of each pass that a graph goes through before its IR is stored, in their order."""
    return described(pass_.run for pass_ in (*FX_PASSES, *OV_PASSES) if pass_.stage != "device")


def device_passes(config: Mapping[str, Any]) -> list[str]:
    """Returns name and digest of each pass that a model goes through when it is compiled with these properties."""
    return described(pass_.run for pass_ in due(OV_PASSES, "device", PassContext(config=config)))


def all_passes() -> list[str]:
    """Returns name and digest of every pass, whatever the properties."""
    return described(pass_.run for pass_ in (*FX_PASSES, *OV_PASSES))


def described(passes: Iterable[Callable[..., None]]) -> list[str]:
    """Returns name and digest of each pass."""
    return [f"{function.__name__} {file_digest(file_of(function))}" for function in passes]


def file_of(function: Callable[..., Any]) -> Path:
    """Returns the file that defines a pass or a condition."""
    return Path(str(sys.modules[function.__module__].__file__)).resolve()


@functools.lru_cache(maxsize=64)
def file_digest(path: Path) -> str:
    """Returns the digest of a file of this folder, with the files here that it imports, directly or through others.

    Raises:
        FileNotFoundError: A file is missing.
    """
    return digest_of_files(_ROOM, files_behind(path))


def files_behind(path: Path) -> list[Path]:
    """Returns a file of this folder and those here that it imports, directly or through others."""
    files: set[Path] = set()
    waiting = [path]
    while waiting:
        if (current := waiting.pop()) not in files:
            files.add(current)
            names = _IMPORT.findall(current.read_text(encoding="utf-8"))
            waiting += [_ROOM.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    return sorted(files)
