"""Describes the module state that an exported graph relies on, so that a change is noticed before a result is stale.

torch.export records one run and leaves no guards. Weights are passed at each call; what remains to be compared are the
modules themselves, their mode, and plain attributes that the code may have read. Objects of other classes are compared
by identity; `ReachedState` compares what is inside them.
"""

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import StateKeeper
from torchserve_openvino.backend.capture.reached_state import ReachedState
from torchserve_openvino.ops.padded_encoders import zeroing_padding

_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
# Tables of weights, which are looked up at each call.
_PASSED = frozenset({"_parameters", "_buffers"})
_MAX_DEPTH = 3
_MAX_ITEMS = 64


def module_state(model: torch.nn.Module) -> list[Any]:
    """Returns all state but the weights' content, to compare with ``==``; takes about a microsecond per attribute."""
    # Records which names share a tensor, because an exported graph takes it only once.
    seen: dict[int, int] = {}
    return [entry for module in model.modules() for entry in (*_attributes(module), *_weights(module, seen))]


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
        # Compared as text, because 0.0 equals -0.0, True equals 1, and nan does not equal itself.
        return (kind, repr(value)) if kind in {float, complex, bool} else value
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, dict, collections.deque)) and len(value) <= _MAX_ITEMS:
        items: Sequence[Any] = list(value.items()) if isinstance(value, dict) else list(value)
        return kind, [_plain(item, depth + 1) for item in items]
    # Of a long container only identity and length are compared, because this runs at each call.
    return kind, id(value), len(value) if isinstance(value, (list, tuple, dict, set, collections.deque)) else 0


class Watched(torch.nn.Module):
    """Wraps a module for torch.export, which silently discards the changes that a run makes to Python's state.

    Args:
        model: The module.
        changes: Receives the names of attributes that a run changed.
        answers: Receives the `AnswerShape` of the result.
    """

    PREFIX = "model."

    def __init__(self, model: torch.nn.Module, changes: list[str], answers: "list[AnswerShape]") -> None:
        super().__init__()
        self.model = model
        # Bound methods, because torch.export restores every attribute of the modules that it runs, lists included.
        self._note = changes.extend
        self._answered = answers.append

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module, and notes its changed attributes and the structure of its result."""
        # torch.export replaces all tensors while it runs, so the state before and after is comparable only in here.
        with zeroing_padding(self.model):
            keeper, reached = StateKeeper(self.model, contents=False), ReachedState(self.model)
            result = self.model(*args, **kwargs)
            self._note(keeper.changed() or list(reached.changed()))
        self._answered(AnswerShape.of(result))
        return result


@dataclass(frozen=True)
class AnswerShape:
    """The structure of a result, including each `torch.Size`, which torch.export would turn into a plain tuple.

    Attributes:
        sizes: For each leaf its length if it is a `torch.Size`, else None.
    """

    spec: Any
    sizes: tuple[int | None, ...]

    @classmethod
    def of(cls, answer: Any) -> "AnswerShape":
        """Returns the structure of a result."""
        leaves, spec = pytree.tree_flatten(answer, is_leaf=lambda value: isinstance(value, torch.Size))
        return cls(spec, tuple(len(leaf) if isinstance(leaf, torch.Size) else None for leaf in leaves))

    def build(self, values: Sequence[Any]) -> Any:
        """Builds a result of this structure from the values that the exported program returns."""
        rest = iter(values)
        leaves = [
            next(rest) if length is None else torch.Size([next(rest) for _ in range(length)]) for length in self.sizes
        ]
        return pytree.tree_unflatten(leaves, self.spec)


class LiveTensors:
    """Looks up the tensors that an exported graph names, as the module holds them now.

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
        """Returns the tensors in the order in which they were added."""
        tensors = []
        for path, name in self._paths:
            module: Any = self._model
            for part in path:
                module = module._modules[part]
            tensors.append(getattr(module, name))
        return tensors
