"""The safetensors of a quantized model: its packed layers, and the tensors that are not packed."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.quantized.formats import PARTS, WEIGHT, ZEROS, read
from torchserve_openvino.quantized.layer import QuantizedLinear
from torchserve_openvino.quantized.scheme import Scheme

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The weights of a quantized model; nothing is kept in memory.

    Args:
        folder: Has ``model.safetensors``, or an index and the files that it names, or one other file of this kind.
        scheme: How the layers are packed.

    Attributes:
        names: The packed layers, sorted.

    Raises:
        ModelLoadError: Files are missing or can't be read, or no layer is packed.
    """

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        self._scheme = scheme
        self._places = {name: path for path in _files(folder) for name in _names(path)}
        self.names = sorted(name.removesuffix(f".{WEIGHT}") for name in self._places if name.endswith(f".{WEIGHT}"))
        if not self.names:
            raise ModelLoadError(f"{folder.name} has no packed layer (*.{WEIGHT}), though its config.json names one.")
        self._packed = {
            f"{name}.{part}" for name in self.names for part in PARTS if f"{name}.{part}" in self._places
        }  # fmt: skip
        self._check_names()

    def _check_names(self) -> None:
        for name in self._places:
            layer, _, part = name.rpartition(".")
            if part == ZEROS and f"{layer}.{WEIGHT}" not in self._places:
                raise ModelLoadError(f"{layer}.{WEIGHT} is missing, though there is {name}.")
            if part == "weight" and f"{layer}.{WEIGHT}" in self._places:
                raise ModelLoadError(f"{layer} is there twice, as {name} and as {layer}.{WEIGHT}.")

    def layer(self, name: str) -> QuantizedLinear:
        """Unpacks a layer.

        Raises:
            ModelLoadError: It does not have the form that the configuration names.
        """
        parts = {part: self._tensor(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in self._places}
        return read(name, parts, self._scheme)

    def layers(self) -> Iterator[tuple[str, QuantizedLinear]]:
        """Yields all packed layers with their names, unpacked one after the other."""
        for name in self.names:
            yield name, self.layer(name)

    def dequantized(self, transposed: Callable[[str], bool] = lambda name: False) -> dict[str, Tensor]:
        """Returns a state dict: packed layers as float32 ``NAME.weight``, other tensors as they are stored.

        Args:
            transposed: Whether the model has a layer's weight as ``[in, out]``.
        """
        state = {name: self._tensor(name) for name in self._places if name not in self._packed}
        for name, layer in self.layers():
            weight = layer.dequantized()
            state[f"{name}.weight"] = torch.from_numpy(
                np.ascontiguousarray(weight.T) if transposed(name) else weight
            )  # fmt: skip
        return state

    def _tensor(self, name: str) -> Tensor:
        with _opened(self._places[name]) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json_object(index)["weight_map"].values()))
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} cannot be read: {error}.") from error
        if wrong := [name for name in names if Path(str(name)).name != name or not (folder / name).is_file()]:
            raise ModelLoadError(f"{index} names {', '.join(map(str, wrong))}: no such file in {folder.name}.")
        return [folder / name for name in names]
    files = [folder / _ONE] if (folder / _ONE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        listed = ", ".join(path.name for path in files) or "none"
        raise ModelLoadError(
            f"{folder.name} has no {_ONE} and no {_INDEX}, and of other *.safetensors {listed}, not just one: a "
            "quantized model is read from these only."
        )
    return files


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}.") from error
