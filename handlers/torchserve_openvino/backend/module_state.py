"""What an exported graph took for granted of its module, so that a change is noticed before an answer is stale.

torch.export writes down one run and leaves no guards. Weights are passed anew at each call; what is left are the
modules themselves, their mode, and plain attributes that the code may have read. Objects of classes unknown here count
by identity: what changes inside them is not seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
# Looked up at each call.
_PASSED = frozenset({"_parameters", "_buffers"})
_MAX_DEPTH = 3
_MAX_ITEMS = 64


def module_state(model: torch.nn.Module) -> list[Any]:
    """Everything beside the weights' content, to be compared with ``==``; about a microsecond for each attribute."""
    # Which names share a tensor: an exported graph passes it once.
    seen: dict[int, int] = {}
    return [found for module in model.modules() for found in (*_attributes(module), *_weights(module, seen))]


def _attributes(module: torch.nn.Module) -> Iterator[Any]:
    yield id(module)
    for name, value in vars(module).items():
        if name not in _PASSED:
            yield name
            yield _plain(value, 0)


def _weights(module: torch.nn.Module, seen: dict[int, int]) -> Iterator[Any]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield (name, None) if tensor is None else (
            name, seen.setdefault(id(tensor), len(seen)), tensor.dtype, tensor.shape
        )  # fmt: skip


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _BY_VALUE:
        # By its text: 0.0 equals -0.0, True equals 1, and nan not even itself.
        return (kind, repr(value)) if kind in {float, complex, bool} else value
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, dict)) and len(value) <= _MAX_ITEMS:
        items: Sequence[Any] = list(value.items()) if isinstance(value, dict) else value
        return kind, [_plain(item, depth + 1) for item in items]
    return kind, id(value)


def plain_values(model: torch.nn.Module) -> list[Any]:
    """Attributes that are plain values: what can be compared while torch.export has put stand-ins for all tensors."""
    return [
        (name, value) for module in model.modules() for name, value in vars(module).items() if type(value) in _BY_VALUE
    ]


class Watched(torch.nn.Module):
    """A module around another, for torch.export, which drops what a run does to plain attributes and says nothing.

    Args:
        model: The module.
        changes: Takes the names of attributes that a run changed.
    """

    PREFIX = "model."

    def __init__(self, model: torch.nn.Module, changes: list[str]) -> None:
        super().__init__()
        self.model = model
        # In a function: torch.export puts back every attribute of the modules that it runs, lists included.
        self._note = changes.extend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        before = plain_values(self.model)
        result = self.model(*args, **kwargs)
        after = plain_values(self.model)
        if after != before:
            self._note(name for name, value in after if (name, value) not in before)
        return result


class LiveTensors:
    """The tensors that an exported graph names, as the module has them now.

    Args:
        model: The module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._paths: list[tuple[list[str], str]] = []

    def add(self, name: str) -> None:
        """Adds the qualified name of a parameter, buffer or tensor attribute."""
        *path, last = name.split(".")
        self._paths.append((path, last))

    def __call__(self) -> list[Any]:
        """In the order in which they were added."""
        found = []
        for path, name in self._paths:
            module: Any = self._model
            for part in path:
                module = module._modules[part]
            found.append(getattr(module, name))
        return found
