"""A folder of calls whose answers differed from eager's, kept as tensors and JSON so that a person can rerun them.

A mismatch is two files, private to the user that the worker runs as: ``DIGEST.safetensors`` with the tensors, and
``DIGEST.json``, which is written last and describes them. Reading them executes no code.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.serving.loading.files import private_folder
from torchserve_openvino.serving.shapes.input_spec import Inputs

# Limits of a folder, for all workers that write to it together.
MAX_MISMATCHES = 16
MAX_BYTES = 256 * 1024 * 1024
_FORMAT = 1


@dataclass(frozen=True)
class Mismatch:
    """A kept call; ``model(*args, **kwargs)`` runs it again.

    Attributes:
        answer: Tensors of the answer that was sent.
        expected: Those of eager's answer; empty where it raised.
        facts: What else is known: model, precision, problems, versions.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: list[torch.Tensor]
    expected: list[torch.Tensor]
    facts: dict[str, Any]


class MismatchFolder:
    """Keeps mismatches, up to `MAX_MISMATCHES` and `MAX_BYTES`.

    Args:
        folder: ``handler.openvino.verify.keep_mismatches``; created where it is missing.

    Raises:
        ModelLoadError: The folder can't be created or written to, or others may write to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        private_folder(folder, "handler.openvino.verify.keep_mismatches")

    def keep(
        self,
        digest: str,
        inputs: Inputs,
        answer: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        facts: dict[str, Any],
    ) -> str:
        """Writes one mismatch; one that is there already is left unchanged.

        Returns:
            Why it is not kept; empty where it is.
        """
        if (self._folder / f"{digest}.json").exists():
            return ""
        tensors: dict[str, torch.Tensor] = {}
        try:
            call = _encode(list(inputs), "input", tensors)
            for name, values in (("answer", answer), ("eager", expected)):
                tensors |= {f"{name}.{i}": value.contiguous().clone() for i, value in enumerate(values)}
            content = safetensors.torch.save(tensors)
            if reason := self._full(len(content)):
                return reason
            plain = {**facts, "format": _FORMAT, "call": call, "answers": len(answer), "expected": len(expected)}
            write_atomically(self._folder / f"{digest}.safetensors", content)
            write_atomically(self._folder / f"{digest}.json", json.dumps(plain, indent=2).encode())
        except (OSError, TypeError, ValueError, KeyError) as error:
            # For example a full disk, or a dtype that safetensors does not support.
            return f"{type(error).__name__}: {error}"
        return ""

    def _full(self, more: int) -> str:
        files = [entry for entry in self._folder.iterdir() if entry.is_file()]
        if sum(entry.suffix == ".json" for entry in files) >= MAX_MISMATCHES:
            return f"the folder holds {MAX_MISMATCHES} mismatches"
        if sum(entry.stat().st_size for entry in files) + more > MAX_BYTES:
            return f"the folder would hold more than {MAX_BYTES // 1024**2} MB"
        return ""


def read_mismatch(path: Path) -> Mismatch:
    """Reads a kept call.

    Args:
        path: Its ``.json``; the file with the tensors is in the same folder.
    """
    # A difference may be NaN.
    plain = read_json_object(path, allow_nan=True)
    if plain.pop("format") != _FORMAT:
        raise ValueError(f"{path.name} was written by another version")
    tensors = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    args, kwargs = _decode(plain.pop("call"), tensors)
    answer = [tensors[f"answer.{i}"] for i in range(plain.pop("answers"))]
    expected = [tensors[f"eager.{i}"] for i in range(plain.pop("expected"))]
    return Mismatch(args, kwargs, answer, expected, plain)


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a call as JSON: tensors by their names, everything else by value."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if kind in {tuple, list}:
        return {kind.__name__: [_encode(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(each, f"{name}.{key}", tensors) for key, each in value.items()}}
    if value is None or kind in {bool, int, float, str}:
        return {"value": value}
    raise TypeError(f"a {kind.__name__} among the inputs has no plain form")


def _decode(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(each, tensors) for key, each in content.items()}
    if kind in {"tuple", "list"}:
        items = [_decode(each, tensors) for each in content]
        return tuple(items) if kind == "tuple" else items
    return content
