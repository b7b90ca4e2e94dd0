"""Loads a program of torch.export.save, after checking that nothing in the file is run as code or unpickled.

`torch.export.load` alone trusts its file: it unpickles example inputs with ``weights_only=False`` where the safe way
fails, weights that are marked so, and constants that are objects; it loads compiled libraries (AOTInductor), and
evaluates text (`program_text`). Each is refused here, as are older formats, which hold pickles only.
"""

import io
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchserve_openvino.errors import ModelLoadError, first_line
from torchserve_openvino.files.json_text import JsonError, parse_json
from torchserve_openvino.files.zip_bounds import why_unbounded
from torchserve_openvino.serving.loading.program_text import check_name, check_program

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PROGRAM = "models/model.json"
_EXAMPLES = "data/sample_inputs/model.pt"
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_CONFIGS = {_WEIGHTS: f"{_WEIGHTS}model_weights_config.json", _CONSTANTS: f"{_CONSTANTS}model_constants_config.json"}
_KNOWN = re.compile(
    rf"{_PROGRAM}|{_EXAMPLES}|archive_format|archive_version|byteorder|version|\.data/\w+|\.format_version"
    rf"|\.storage_alignment|extra/.*|{_CONFIGS[_WEIGHTS]}|{_CONFIGS[_CONSTANTS]}"
    rf"|{_WEIGHTS}weight_\w+|{_CONSTANTS}tensor_\w+"
)
_AGAIN = "Write it again with torch.export.save of this version of torch"


def load_program(path: Path) -> "ExportedProgram":
    """Loads a program.

    Args:
        path: A file of ``torch.export.save``, usually ``.pt2``.

    Raises:
        ModelLoadError: It holds something else than a program and tensors, or torch can't read it.
    """
    check_exported(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        # Of many classes: another version's, operators of a library that is not imported.
        raise ModelLoadError(f"torch.export.load could not read {path.name}: {error}") from error


def check_exported(path: Path) -> None:
    """Checks that a file holds a program and tensors only, without loading it.

    Raises:
        ModelLoadError: It holds something else, or can't be read.
    """
    try:
        _check(path)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path.name}: {error}") from error
    except Exception as error:
        # Of many classes: torch's reader and Python's find different things wrong with a damaged file.
        raise ModelLoadError(f"torch.export.load could not read {path.name}: {error}") from error


def _check(path: Path) -> None:
    """Raises ModelLoadError for anything in the file that is neither text of a known form nor a tensor."""
    # Imported here: most models are not exported programs.
    from torch.export.pt2_archive import PT2ArchiveReader

    with zipfile.ZipFile(path) as archive:
        if (reason := why_unbounded(path, archive)) is not None:
            raise ModelLoadError(f"it is not read: {reason}.")
        sizes = _members(archive)
    with PT2ArchiveReader(str(path)) as reader:
        # What is checked must be what torch reads, for which this reader is the one.
        names = reader.get_file_names()
        if sorted(names) != sorted(sizes) or any(reader.archive_file.get_record_size(n) != sizes[n] for n in names):
            raise ModelLoadError("it is read in different ways by different readers.")
        for name in names:
            if not _KNOWN.fullmatch(name):
                raise ModelLoadError(
                    f"it holds {name!r}, which is not part of a program that torch.export.save wrote, or could be run "
                    f"as code (a pickle, a compiled library). {_AGAIN}."
                )
        for needed in (_PROGRAM, _EXAMPLES, *_CONFIGS.values()):
            if needed not in sizes:
                raise ModelLoadError(f"it lacks {needed}. {_AGAIN}.")
        check_program(reader.read_bytes(_PROGRAM))
        for folder in _CONFIGS:
            _check_payload(reader, folder, sizes)
        _check_examples(reader.read_bytes(_EXAMPLES))


def _members(archive: zipfile.ZipFile) -> dict[str, int]:
    """Returns the size of each member by its name without the folder that all are in."""
    names = [info.filename for info in archive.infolist()]
    roots = {name.partition("/")[0] for name in names}
    if len(roots) != 1 or not all("/" in name for name in names):
        raise ModelLoadError(f"its members are not in one folder, as torch.export.save puts them. {_AGAIN}.")
    # torch looks members up without regard to case.
    if len({name.lower() for name in names}) != len(names):
        raise ModelLoadError("two of its members have the same name.")
    return {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}


def _check_payload(reader: Any, folder: str, sizes: dict[str, int]) -> None:
    """Checks the list of weights or constants: tensors only, none larger than what is stored of it."""
    try:
        entries = parse_json(reader.read_bytes(_CONFIGS[folder]))["config"]
        for name, entry in entries.items():
            check_name(name)
            record, pickled, meta = entry["path_name"], entry["use_pickle"], entry["tensor_meta"]
            if f"{folder}{record}" not in sizes or not _KNOWN.fullmatch(f"{folder}{record}"):
                raise ModelLoadError(f"{name} is stored as {record!r}, which is no tensor of this file. {_AGAIN}.")
            if pickled:
                # A subclass of Tensor. Loading it again without the restriction meets the same classes.
                _tensors_only(reader.read_bytes(f"{folder}{record}"), f"{folder}{record} ({name})")
            elif not sizes[f"{folder}{record}"] and all(size.get("as_int") != 0 for size in meta["sizes"]):
                # torch would allocate whatever size the list claims.
                raise ModelLoadError(f"{name} claims {meta['sizes']}, and has no content.")
    except (JsonError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{_CONFIGS[folder]} is no list of tensors ({error!r}). {_AGAIN}.") from error


def _check_examples(content: bytes) -> None:
    if content and not isinstance(_tensors_only(content, _EXAMPLES), (tuple, dict)):
        raise ModelLoadError(f"{_EXAMPLES} holds no inputs.")


def _tensors_only(content: bytes, name: str) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # Of many classes, by what is wrong in the pickle.
        reason = first_line(error)
        raise ModelLoadError(
            f"{name} cannot be loaded with weights_only=True ({reason}). Only tensors and plain values are read, never "
            "pickled objects. If these are example inputs, set program.example_inputs = None before torch.export.save."
        ) from error
