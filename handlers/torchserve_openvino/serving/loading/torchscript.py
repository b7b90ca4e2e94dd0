"""Loads a TorchScript archive, after checking that it reads and allocates nothing but what it holds.

`torch.jit.load` unpickles with a reader of its own, which knows tensors, plain values and TorchScript's classes, and
compiles the archive's code, which can compute, but reach neither Python nor other processes. Two things are left to
check: operators that open files, and tensors that claim more memory than is stored of them, beyond the end of which
torch would read.
"""

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchserve_openvino.backend.upstream._torch_script import opens_files, record_sizes
from torchserve_openvino.errors import ModelLoadError, first_line
from torchserve_openvino.files.zip_bounds import read_member, why_unbounded

_KNOWN = re.compile(
    r"version|byteorder|\.data/\w+|\.format_version|\.storage_alignment|extra/.*"
    r"|code/.+\.py(\.debug_pkl)?|(data|constants|traced_inputs)(\.pkl|/\d+)|bytecode\.pkl|bytecode/\d+"
    r"|mobile_debug_handles\.pkl"
)
# torch.jit.load leaves the inputs of a trace, which have no content, alone.
_PICKLES = ("data", "constants")
# Between the words of a name, TorchScript allows spaces, comments and broken lines.
_GAP = r"(?:\s|\\|#[^\n]*\n)*"
_OPERATOR = re.compile(rf"\b(?:torch|ops{_GAP}\.{_GAP}(\w+)){_GAP}\.{_GAP}(\w+)")
_ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "QInt8": 1, "QUInt8": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4,
    "Float": 4, "QInt32": 4, "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    """Loads a scripted or traced module.

    Args:
        path: A file of ``torch.jit.save``.

    Raises:
        ModelLoadError: It holds something else than a module, or torch can't read it.
    """
    check_torchscript(path)
    try:
        module: torch.jit.ScriptModule = torch.jit.load(str(path), map_location="cpu")
    except Exception as error:
        # Of many classes: operators or classes of a library that is not imported, a newer version's format.
        raise ModelLoadError(f"torch.jit.load could not read {path.name}: {first_line(error)}") from error
    if not hasattr(module, "forward"):
        raise ModelLoadError(f"{path.name} is TorchScript without a method `forward`, which answers requests.")
    return module


def check_torchscript(path: Path) -> None:
    """Checks a TorchScript archive without loading it.

    Raises:
        ModelLoadError: It has members that torch.jit.save does not write, opens files, or claims more memory than it
            holds.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check(path, archive)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path.name}: {error}") from error
    except Exception as error:
        # Of many classes: torch's reader and Python's find different things wrong with a damaged file.
        raise ModelLoadError(f"torch.jit.load could not read {path.name}: {first_line(error)}") from error


def _check(path: Path, archive: zipfile.ZipFile) -> None:
    if (reason := why_unbounded(path, archive)) is not None:
        raise ModelLoadError(f"it is not read: {reason}.")
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    # torch looks members up without regard to case, below the folder of the first.
    if len({name.lower() for name in members}) != len(archive.infolist()):
        raise ModelLoadError("two of its members have the same name.")
    sizes = {name: info.file_size for name, info in members.items()}
    # What is checked must be what torch reads.
    if record_sizes(path) != sizes:
        raise ModelLoadError("it is read in different ways by different readers.")
    for name, info in members.items():
        if not _KNOWN.fullmatch(name):
            raise ModelLoadError(f"it holds {name!r:.200}, which is not part of a TorchScript archive.")
        if name.startswith("code/") and name.endswith(".py"):
            _check_code(name, read_member(archive, info.filename).decode("utf-8", "replace"))
    for folder in _PICKLES:
        if (pickled := members.get(f"{folder}.pkl")) is not None:
            _Storages(read_member(archive, pickled.filename), folder, sizes).load()


def _check_code(name: str, text: str) -> None:
    for space, operator in sorted({(match[1] or "aten", match[2]) for match in _OPERATOR.finditer(text)}):
        if opens_files(f"{space}::{operator}"):
            raise ModelLoadError(f"{name} calls {space}::{operator}, which opens files: it is not loaded.")


class _Inert:
    """Stands for every object in a pickle: it takes whatever is done to it, and does nothing."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Takes an item."""

    def extend(self, items: Any) -> None:
        """Takes items."""


class _Storages(pickle.Unpickler):
    """Reads which memory a pickle's tensors claim; creates no object that the pickle names.

    Args:
        content: The pickle.
        folder: The folder of the archive that has the memory.
        sizes: Size of each member of the archive.
    """

    def __init__(self, content: bytes, folder: str, sizes: dict[str, int]) -> None:
        super().__init__(io.BytesIO(content))
        self._folder, self._sizes = folder, sizes

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns a class that does nothing, whatever the name."""
        return type("_Inert", (_Inert,), {"kind": global_name})

    def persistent_load(self, pid: Any) -> Any:
        """Checks one storage: its type, its name, and its number of items.

        Raises:
            ModelLoadError: It claims more than is stored of it.
        """
        _, kind, key, _, items = pid
        item = _ITEM_BYTES.get(getattr(kind, "kind", "").removesuffix("Storage"))
        if item is None or not isinstance(items, int) or items < 0:
            name = getattr(kind, "kind", kind)
            raise ModelLoadError(f"{self._folder}.pkl has a tensor of the unknown type {name!r:.100}.")
        stored = self._sizes.get(f"{self._folder}/{key}", 0)
        if items * item > stored:
            raise ModelLoadError(
                f"{self._folder}.pkl claims {items * item} bytes in {self._folder}/{key!s:.100}, which has {stored}."
            )
        return _Inert()
