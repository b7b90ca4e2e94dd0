"""Compares the state outside modules that a model's code can reach, which an exported graph contains as constants.

This is what `module_state` leaves out: attributes of plain objects, items of containers of any length and depth,
attributes of the user's classes, and the globals and closures that the user's functions refer to by name. Installed
packages are not searched. State that code reaches by a computed name (``getattr``, ``globals()``) in a global module is
covered only as far as the name stands somewhere in the code.
"""

import collections
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3

from torchserve_openvino.backend.capture.kept_state import PLAIN, same
from torchserve_openvino.cache.identity.fingerprint import slots_of
from torchserve_openvino.cache.identity.provenance import is_installed, is_library, is_torch

# Their content is no state, or is watched by other means.
_SKIPPED = (
    *PLAIN, torch.Tensor, torch._C.ScriptObject, types.BuiltinFunctionType, types.CodeType, types.ModuleType,
    logging.Logger, type(threading.Lock()), type(threading.RLock()), weakref.ref,
)  # fmt: skip
# Tables of a module that `module_state` compares, or that follow from the weights.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
# Python's own entries in a class or module, among them some that it adds later.
_BOOKKEEPING = frozenset({"__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"})


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
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._holders: list[_Holder] = []
        # Keeps visited objects alive, so that no id is reused.
        self._seen: dict[int, Any] = {}
        waiting: list[tuple[Any, str]] = [(model, type(model).__name__)]
        while waiting:
            value, name = waiting.pop()
            if isinstance(value, _SKIPPED) or id(value) in self._seen:
                continue
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
            return [(each, name) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, (property, staticmethod, classmethod)):
            parts = [getattr(value, each, None) for each in ("fget", "fset", "__func__")]
            return [(each, name) for each in parts if each is not None]
        if isinstance(value, np.ndarray):
            return self._hold(name, lambda: _array_content(value))
        return self._content(value, name)

    def _content(self, value: Any, name: str) -> list[tuple[Any, str]]:
        """Does so for a container or a plain object."""
        inside: list[tuple[Any, str]] = []
        if isinstance(value, dict):
            inside += self._hold(name, lambda: [each for pair in value.items() for each in pair])
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            inside += self._hold(name, lambda: list(value))
        attributes = None if is_torch(type(value).__module__) else getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inside += self._hold(name, lambda: [each for pair in attributes.items() for each in pair])
        if slots := [each for cls in type(value).__mro__ for each in slots_of(cls)]:
            inside += self._hold(name, lambda: [getattr(value, each, None) for each in slots])
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
        contents = [(each, name) for each in (function.__defaults__, function.__kwdefaults__, vars(function))]
        cells = function.__closure__ or ()
        for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
            contents += self._hold(variable, functools.partial(_content_of, cell))
        names = _names(function.__code__)
        contents += self._namespace(function.__globals__, names)
        return contents

    def _namespace(self, content: dict[str, Any], names: frozenset[str]) -> list[tuple[Any, str]]:
        """Holds each global that code may read, by the names in it, and those of the user's modules among them."""
        contents: list[tuple[Any, str]] = []
        for each in sorted(names & content.keys()):
            held = self._hold(f"global {each}", functools.partial(_global, content, each))
            contents += held
            module = held[0][0]
            if (
                isinstance(module, types.ModuleType)
                and not _is_package(module.__name__)
                and id(module) not in self._seen
            ):
                self._seen[id(module)] = module
                contents += self._namespace(vars(module), names)
        return contents


def _global(content: dict[str, Any], name: str) -> list[Any]:
    return [content.get(name)]


def _members(cls: type) -> list[Any]:
    return [each for pair in vars(cls).items() if pair[0] not in _BOOKKEEPING for each in pair]


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
    nested = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*nested)
