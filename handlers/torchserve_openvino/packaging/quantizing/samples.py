"""Reads requests for calibration and evaluation, and finds out what a handler gives its model for each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn
from torch.utils import _pytree as pytree

from torchserve_openvino.errors import PackagingError
from torchserve_openvino.files.json_text import read_json
from torchserve_openvino.files.zip_bounds import why_unbounded_file
from torchserve_openvino.serving.loading.files import MAX_SAMPLE_BYTES
from torchserve_openvino.serving.shapes.input_spec import Inputs


@dataclass(frozen=True)
class CalibrationSample:
    """One request.

    Attributes:
        name: File name, or place in a .npz file.
        inputs: What the model is called with, a batch of one.
        label: Its class; None if that is not known.
    """

    name: str
    inputs: Inputs
    label: int | None = None


@dataclass(frozen=True)
class Samples:
    """Requests, and a digest of what they were read from."""

    items: tuple[CalibrationSample, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.items)


def read(path: Path, most: int, labels: Path | None, inputs_for: Callable[[bytes], Inputs], key: str) -> Samples:
    """Reads requests.

    Args:
        path: A folder of request bodies, or a .npz file.
        most: How many are read.
        labels: File with their classes.
        inputs_for: Returns what the model is called with for a body.
        key: Of the YAML, for messages.

    Raises:
        PackagingError: There are none, or the handler does not answer one, or a class is missing.
    """
    classes = _labels(labels, key) if labels is not None else None
    if path.is_dir():
        items, digest = _from_folder(path, most, classes, inputs_for, key)
    elif path.suffix == ".npz" and path.is_file():
        items, digest = _from_arrays(path, most, classes, key)
    else:
        raise PackagingError(f"{key}.data: {path} is neither a folder of requests nor a .npz file.")
    if not items:
        raise PackagingError(f"{key}.data: {path} holds no requests.")
    return Samples(tuple(items), digest)


def _labels(path: Path, key: str) -> dict[str, int] | list[int]:
    try:
        labels: dict[str, int] | list[int] = read_json(path)
    except (OSError, ValueError) as error:
        raise PackagingError(f"{key}.labels: {error}") from error
    values = labels.values() if isinstance(labels, dict) else labels
    if not isinstance(labels, (dict, list)) or not all(type(value) is int and value >= 0 for value in values):
        raise PackagingError(f"{key}.labels: {path} must hold numbers of classes, by file name or in a list.")
    return labels


def _from_folder(
    folder: Path, most: int, classes: Any, inputs_for: Callable[[bytes], Inputs], key: str
) -> tuple[list[CalibrationSample], str]:
    if isinstance(classes, list):
        raise PackagingError(f"{key}.labels: for a folder, classes are given by file name.")
    hashed, items = blake3(), []
    for path in sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))[:most]:
        if path.stat().st_size > MAX_SAMPLE_BYTES:
            raise PackagingError(f"{key}.data: {path} has more than {MAX_SAMPLE_BYTES >> 20} MiB, and is no request.")
        if classes is not None and path.name not in classes:
            raise PackagingError(f"{key}.labels has no class for {path.name}.")
        body = path.read_bytes()
        hashed.update(path.name.encode() + b"\0" + len(body).to_bytes(8, "little") + body)
        try:
            inputs = inputs_for(body)
        except Exception as error:
            raise PackagingError(f"{key}.data: the handler does not answer {path.name}: {error}") from error
        items.append(CalibrationSample(path.name, inputs, classes[path.name] if classes is not None else None))
    return items, hashed.hexdigest()


def _from_arrays(path: Path, most: int, classes: Any, key: str) -> tuple[list[CalibrationSample], str]:
    if isinstance(classes, dict):
        raise PackagingError(f"{key}.labels: for a .npz file, classes are a list.")
    if (reason := why_unbounded_file(path)) is not None:
        raise PackagingError(f"{key}.data: {path} is not read: {reason}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError) as error:
        raise PackagingError(f"{key}.data: {path} can't be read: {error}") from error
    counts = {len(array) for array in arrays.values() if array.dim()}
    if len(counts) != 1:
        raise PackagingError(f"{key}.data: the arrays in {path} must be as many items each; they are {sorted(counts)}.")
    count = min(most, counts.pop())
    if classes is not None and len(classes) < count:
        raise PackagingError(f"{key}.labels has {len(classes)} classes for {count} items.")
    # NumPy calls arrays without a name arr_0, arr_1, and so on.
    positional = all(name.startswith("arr_") for name in arrays)
    items = []
    for index in range(count):
        values = {name: array[index : index + 1] for name, array in arrays.items()}
        inputs: Inputs = (tuple(values.values()), {}) if positional else ((), values)
        items.append(CalibrationSample(str(index), inputs, classes[index] if classes is not None else None))
    return items, blake3().update_mmap(path).hexdigest()


class Caller:
    """Runs a handler on bodies, and takes down the first call of its model.

    Args:
        model: The model that the handler calls.
        run: Answers one body by the handler's own code.
    """

    def __init__(self, model: nn.Module, run: Callable[[bytes], Any]) -> None:
        self._model, self._run = model, run

    def __call__(self, body: bytes) -> Inputs:
        """Returns what the model is called with.

        Raises:
            PackagingError: The handler does not call it.
        """
        seen: list[Inputs] = []

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not seen:
                seen.append(pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs)))

        hook = self._model.register_forward_pre_hook(take, with_kwargs=True)
        try:
            answer = self._run(body)
        finally:
            hook.remove()
        if not seen:
            raise PackagingError(f"it does not call its model for it, and answers {str(answer)[:300]}")
        return seen[0]


def shared_items(one: Samples, other: Samples) -> int:
    """Returns how many requests of the first have the same inputs as one of the second."""
    known = {_digest(sample) for sample in other.items}
    return sum(_digest(sample) in known for sample in one.items)


def _digest(sample: CalibrationSample) -> str:
    hashed = blake3()
    for leaf in pytree.tree_leaves(sample.inputs):
        if isinstance(leaf, torch.Tensor):
            values = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            hashed.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            hashed.update(values.numpy().tobytes())
        else:
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()


def distinct_shapes(samples: Sequence[CalibrationSample]) -> Iterator[CalibrationSample]:
    """Yields the first sample of each combination of shapes."""
    seen = set()
    for sample in samples:
        leaves = pytree.tree_leaves(sample.inputs)
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if shapes not in seen:
            seen.add(shapes)
            yield sample
