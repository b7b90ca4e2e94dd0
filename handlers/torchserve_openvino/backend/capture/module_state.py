"""Describes the module state that an exported graph relies on, so that a change is noticed before a result is stale.

torch.export records one run and leaves no guards. Weights are passed at each call; what remains to be compared are the
modules themselves, their mode, and plain attributes that the code may have read. Objects of other classes are compared
by identity; `ReachedState` compares what is inside them.
"""

import collections
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import PLAIN, StateKeeper, same
from torchserve_openvino.cache.identity.code_walk import is_installed, is_library, is_torch
from torchserve_openvino.cache.identity.fingerprint import slots_of
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


# --- compares the state outside modules that a model's code can reach, which an exported graph contains as constants
# This is what `module_state` leaves out: attributes of plain objects, items of containers of any length and depth,
# attributes of the user's classes, and the globals and closures that the user's functions refer to by name. Installed
# packages are not searched. State that code reaches by a computed name (``getattr``, ``globals()``) in a global module
# is covered only as far as the name stands somewhere in the code.


# Their content is no state, or is watched by other means.
_SKIPPED = (
    *PLAIN, torch.Tensor, torch._C.ScriptObject, types.BuiltinFunctionType, types.CodeType, types.ModuleType,
    logging.Logger, type(threading.Lock()), type(threading.RLock()), weakref.ref,
)  # fmt: skip
_PACKAGE = "torchserve_openvino."
# A model has some hundreds: so many are another program's, which the code has no use for.
_MOST_OBJECTS = 100_000
# Tables of a module that `module_state` compares, or that follow from the weights.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
# Python's own entries in a class or module, among them some that it adds later.
_BOOKKEEPING = frozenset({"__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"})


class UnboundedStateError(Exception):
    """A model's code may read more state than can be compared at each call."""


class _Holder(NamedTuple):
    """Something that holds values: its name for messages, a function that reads its values, and what they were."""

    name: str
    read: Callable[[], list[Any]]
    values: list[Any]


class ReachedState:
    """A snapshot of the state that a module's code can reach outside the tables of the modules.

    Takes about 50 ns per value to compare.

    Args:
        model: The module.

    Raises:
        UnboundedStateError: There is too much of it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._holders: list[_Holder] = []
        # Keeps visited objects alive, so that no id is reused.
        self._seen: dict[int, Any] = {}
        waiting: list[tuple[Any, str]] = [(model, type(model).__name__)]
        while waiting:
            value, name = waiting.pop()
            if isinstance(value, _SKIPPED) or id(value) in self._seen or _is_ours(value):
                continue
            if len(self._seen) == _MOST_OBJECTS:
                raise UnboundedStateError(f"the model's code reaches more than {_MOST_OBJECTS} Python objects")
            self._seen[id(value)] = value
            waiting += self._visit(value, name)

    def changed(self) -> Iterator[str]:
        """Yields the name of each holder whose values have changed."""
        for name, read, before in self._holders:
            now = read()
            if len(now) != len(before) or not all(map(same, before, now)):
                yield name

    def _hold(self, name: str, read: Callable[[], list[Any]]) -> list[tuple[Any, str]]:
        values = read()
        self._holders.append(_Holder(name, read, values))
        return [(value, name) for value in values]

    def _visit(self, value: Any, name: str) -> list[tuple[Any, str]]:
        """Holds a value's content; returns what is in it."""
        if isinstance(value, torch.nn.Module):
            attributes = [
                (item, f"{name}.{key}")
                for key, item in vars(value).items()
                # `module_state` notices when one of the many empty tables of hooks is no longer empty.
                if key not in _MODULE_TABLES and not (isinstance(item, (dict, list, set)) and not item)
            ]
            children = [(child, f"{name}.{key}") for key, child in value._modules.items()]
            return [*attributes, *children, (type(value), type(value).__name__)]
        if isinstance(value, types.FunctionType):
            return self._function(value, name)
        if isinstance(value, types.MethodType):
            return [(value.__func__, name), (value.__self__, name)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, functools.partial):
            return [(part, name) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, (property, staticmethod, classmethod)):
            parts = [getattr(value, attribute, None) for attribute in ("fget", "fset", "__func__")]
            return [(part, name) for part in parts if part is not None]
        if isinstance(value, np.ndarray):
            return self._hold(name, lambda: _array_content(value))
        return self._content(value, name)

    def _content(self, value: Any, name: str) -> list[tuple[Any, str]]:
        """Does so for a container or a plain object."""
        inside: list[tuple[Any, str]] = []
        if isinstance(value, dict):
            inside += self._hold(name, lambda: [item for pair in value.items() for item in pair])
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            inside += self._hold(name, lambda: list(value))
        attributes = None if is_torch(type(value).__module__) else getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inside += self._hold(name, lambda: [item for pair in attributes.items() for item in pair])
        if slots := [slot for cls in type(value).__mro__ for slot in slots_of(cls)]:
            inside += self._hold(name, lambda: [getattr(value, slot, None) for slot in slots])
        return [*inside, (type(value), type(value).__name__)]

    def _class(self, cls: type) -> list[tuple[Any, str]]:
        contents: list[tuple[Any, str]] = []
        for base in cls.__mro__:
            if not is_library(base) and (base is cls or id(base) not in self._seen):
                self._seen[id(base)] = base
                contents += self._hold(base.__name__, functools.partial(_members, base))
        return contents

    def _function(self, function: types.FunctionType, name: str) -> list[tuple[Any, str]]:
        if is_library(function) and _is_package(function.__globals__.get("__name__")):
            return []
        contents = [(content, name) for content in (function.__defaults__, function.__kwdefaults__, vars(function))]
        cells = function.__closure__ or ()
        for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
            contents += self._hold(variable, functools.partial(_content_of, cell))
        names = _names(function.__code__)
        contents += self._namespace(function.__globals__, names)
        return contents

    def _namespace(self, content: dict[str, Any], names: frozenset[str]) -> list[tuple[Any, str]]:
        """Holds each global that code may read, by the names in it, and those of the user's modules among them."""
        contents: list[tuple[Any, str]] = []
        for key in sorted(names & content.keys()):
            value = self._hold(f"global {key}", functools.partial(_global, content, key))
            contents += value
            module = value[0][0]
            if (
                isinstance(module, types.ModuleType)
                and not _is_package(module.__name__)
                and id(module) not in self._seen
            ):
                self._seen[id(module)] = module
                contents += self._namespace(vars(module), names)
        return contents


def _is_ours(value: Any) -> bool:
    """Returns True for a compiled model and the like: what a global of that name has is no state of a user's."""
    return type(value).__module__.startswith(_PACKAGE) and not isinstance(value, torch.nn.Module)


def _global(content: dict[str, Any], name: str) -> list[Any]:
    return [content.get(name)]


def _members(cls: type) -> list[Any]:
    return [item for pair in vars(cls).items() if pair[0] not in _BOOKKEEPING for item in pair]


def _array_content(array: "np.ndarray[Any, Any]") -> list[Any]:
    values = array.ravel().tolist() if array.dtype.hasobject else [blake3(array.tobytes()).hexdigest()]
    return [str(array.shape), array.dtype.str, *values]


def _is_package(name: Any) -> bool:
    return isinstance(name, str) and (is_torch(name) or is_installed(name))


def _content_of(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _names(code: types.CodeType) -> frozenset[str]:
    """Returns the globals and attributes to which code and its nested functions refer."""
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*nested)
