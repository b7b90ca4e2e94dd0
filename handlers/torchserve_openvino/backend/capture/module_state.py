"""What an exported graph took for granted of its module, so that a change is noticed before an answer is stale.

torch.export writes down one run and leaves no guards. Weights are passed anew at each call; what is left are the
modules themselves, their mode, and plain attributes that the code may have read. Objects of classes unknown here count
by identity: what changes inside them is not seen.
"""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import StateKeeper

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
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, dict, collections.deque)) and len(value) <= _MAX_ITEMS:
        items: Sequence[Any] = list(value.items()) if isinstance(value, dict) else list(value)
        return kind, [_plain(item, depth + 1) for item in items]
    # Of a long one only the length is looked at: this runs at each call.
    return kind, id(value), len(value) if isinstance(value, (list, tuple, dict, set, collections.deque)) else 0


class Watched(torch.nn.Module):
    """A module around another, for torch.export, which drops what a run does to attributes and says nothing.

    Args:
        model: The module.
        changes: Takes the names of attributes that a run changed.
        answers: Takes the answer's `AnswerShape`.
    """

    PREFIX = "model."

    def __init__(self, model: torch.nn.Module, changes: list[str], answers: "list[AnswerShape]") -> None:
        super().__init__()
        self.model = model
        # In functions: torch.export puts back every attribute of the modules that it runs, lists included.
        self._note = changes.extend
        self._answered = answers.append

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        # While torch.export runs, stand-ins for all tensors are in their places: here only they can be compared.
        keeper = StateKeeper(self.model, contents=False)
        result = self.model(*args, **kwargs)
        self._note(keeper.changed())
        self._answered(AnswerShape.of(result))
        return result


@dataclass(frozen=True)
class AnswerShape:
    """The structure of an answer; torch.export itself makes plain tuples of sizes.

    Attributes:
        sizes: For each leaf its length where it is a size.
    """

    spec: Any
    sizes: tuple[int | None, ...]

    @classmethod
    def of(cls, answer: Any) -> "AnswerShape":
        """Reads it off an answer."""
        leaves, spec = pytree.tree_flatten(answer, is_leaf=lambda value: isinstance(value, torch.Size))
        return cls(spec, tuple(len(leaf) if isinstance(leaf, torch.Size) else None for leaf in leaves))

    def build(self, values: Sequence[Any]) -> Any:
        """An answer of this structure, from the values that the exported program returns."""
        rest = iter(values)
        leaves = [
            next(rest) if length is None else torch.Size([next(rest) for _ in range(length)]) for length in self.sizes
        ]
        return pytree.tree_unflatten(leaves, self.spec)


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
