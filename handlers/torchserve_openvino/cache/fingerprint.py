"""What a model computes, as two digests, found without tracing it: its code and settings, and its weights.

Dynamo would know the graph, at the price of seconds. Here the module tree is walked instead: class by class, attribute
by attribute, and through every function of the user's that ``forward`` reaches, with the constants, defaults, closures
and globals that it reads. Code of installed packages counts by version, and by content for the files that define the
model's classes. What can't be known is named, and such a model is not started without tracing.
"""

import enum
import functools
import logging
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from torchserve_openvino.cache.provenance import is_installed, is_torch, source_digest, version
from torchserve_openvino.cache.tensors import tensor_digest, weights_digest

# Plain values whose text says all.
_BY_TEXT = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.generic, np.dtype,
)  # fmt: skip
# They change no answer.
_IGNORED = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
_CLASS_BOOKKEEPING = frozenset(
    {
        "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__abstractmethods__",
        "__static_attributes__", "__parameters__", "__orig_bases__", "_abc_impl", "__annotate__", "__annotate_func__",
    }
)  # fmt: skip
# Of a torch.nn.Module: walked by their own functions, or bookkeeping of torch's.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl"})


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model.

    Attributes:
        code: Of code, settings and structure.
        weights: Of parameters and buffers: names, types, shapes, strides, content.
        unknown: What could not be made part of ``code``; while it is not empty two models may share one digest.
    """

    code: str
    weights: str
    unknown: tuple[str, ...] = ()


def fingerprint(model: Any) -> Fingerprint:
    """Walks a model: a module or any other callable.

    Takes about 0.3 s for each GB of weights, and milliseconds for the rest.
    """
    walk = _Walk()
    walk.value(model, type(model).__name__)
    return Fingerprint(walk.hash.hexdigest(), weights_digest(model), tuple(walk.unknown))


class _Walk:
    """One pass over everything that a model reaches."""

    def __init__(self) -> None:
        self.hash = blake3()
        self.unknown: list[str] = []
        self._seen: dict[int, int] = {}
        # An id stays taken while the walk lasts.
        self._alive: list[Any] = []

    def _put(self, kind: str, text: str = "") -> None:
        self.hash.update(f"{kind}:{len(text)}:{text};".encode(errors="surrogatepass"))

    def value(self, value: Any, place: str) -> None:
        """Adds any value; ``place`` is how a message names it."""
        if isinstance(value, enum.Enum):
            self._put("enum", f"{_name(type(value))}.{value.name}")
        elif isinstance(value, _BY_TEXT):
            self._put(type(value).__name__, repr(value))
        elif isinstance(value, _IGNORED):
            return
        elif id(value) in self._seen:
            self._put("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._compound(value, place)

    def _compound(self, value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            self._put("tensor", tensor_digest(value) if value.layout is torch.strided else _name(type(value)))
        elif isinstance(value, np.ndarray):
            self._put("array", f"{value.dtype}{value.shape}")
            self.hash.update(np.ascontiguousarray(value).tobytes() if value.dtype != object else repr(value).encode())
        elif isinstance(value, (list, tuple)):
            self._put(_name(type(value)), str(len(value)))
            for i, item in enumerate(value):
                self.value(item, f"{place}[{i}]")
        elif isinstance(value, (set, frozenset)):
            self._put("set", repr(sorted(map(repr, value))))
        elif isinstance(value, Mapping):
            self._put(_name(type(value)), str(len(value)))
            for key, item in value.items():
                self.value(key, place)
                self.value(item, f"{place}[{key!r}]")
        elif isinstance(value, torch.nn.Module):
            self._module(value, place)
        elif isinstance(value, types.ModuleType):
            self._put("python module", f"{value.__name__} {version(value.__name__)}")
        elif isinstance(value, type):
            self._class(value, place)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._put("operator", str(value))
        else:
            self._callable_or_object(value, place)

    def _callable_or_object(self, value: Any, place: str) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value, place)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, place)
            self.value(value.__self__, place)
        elif isinstance(value, (staticmethod, classmethod)):
            self._put(type(value).__name__)
            self.value(value.__func__, place)
        elif isinstance(value, property):
            self.value((value.fget, value.fset), place)
        elif isinstance(value, functools.partial):
            self.value((value.func, value.args, value.keywords), place)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.value(value.__wrapped__, place)
        elif isinstance(value, types.CodeType):
            self._code(value, place)
        elif isinstance(value, _BUILTINS):
            self._put("builtin", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}")
        else:
            self._object(value, place)

    def _object(self, value: Any, place: str) -> None:
        """An instance of any other class, by its attributes."""
        slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
        attributes = getattr(value, "__dict__", None)
        if attributes is None and not slots:
            # Immutable and without attributes, as far as Python can tell: only a class with a text of its own will do.
            if type(value).__reduce__ is object.__reduce__ and type(value).__reduce_ex__ is object.__reduce_ex__:
                self.unknown.append(f"{place} ({_name(type(value))})")
            text = repr(value)
            if " at 0x" in text:
                self.unknown.append(f"{place} ({_name(type(value))})")
                text = ""
            self._put("object", f"{_name(type(value))} {text}")
            return
        self._put("object", _name(type(value)))
        self.value(type(value), place)
        for name in sorted({*(attributes or ()), *slots}):
            self._put("attribute", name)
            self.value(getattr(value, name, None) if name in slots else (attributes or {})[name], f"{place}.{name}")

    # --- modules and classes ------------------------------------------------------------------------------------

    def _module(self, module: torch.nn.Module, place: str) -> None:
        self._put("module", _name(type(module)))
        self.value(type(module), place)
        for name, item in sorted(vars(module).items()):
            if name not in _MODULE_TABLES:
                self._put("attribute", name)
                self.value(item, f"{place}.{name}")
        for kind in ("_parameters", "_buffers"):
            table: dict[str, torch.Tensor | None] = getattr(module, kind)
            # Their content is the other digest's.
            self._put(kind, repr([(name, t is not None, type(t).__name__) for name, t in table.items()]))
        for name, child in module._modules.items():
            self._put("child", name)
            self.value(child, f"{place}.{name}")

    def _class(self, cls: type, place: str) -> None:
        self._put("class", _name(cls))
        for base in cls.__mro__:
            if base is object or is_torch(base.__module__):
                self._put("base", _name(base))
            elif is_installed(base.__module__):
                self._put("base", f"{_name(base)} {version(base.__module__)} {source_digest(base.__module__)}")
            else:
                self._own_class(base, place)

    def _own_class(self, cls: type, place: str) -> None:
        self._put("own class", _name(cls))
        for name, item in sorted(vars(cls).items()):
            if name in _CLASS_BOOKKEEPING or isinstance(item, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                continue
            self._put("member", name)
            self.value(item, f"{cls.__qualname__}.{name}")

    # --- code ---------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, place: str) -> None:
        module = function.__module__ or ""
        if is_torch(module) or is_installed(module):
            self._put("function", f"{module}.{function.__qualname__} {version(module)}")
            return
        self._put("own function")
        code = function.__code__
        self._code(code, place)
        self.value((function.__defaults__, function.__kwdefaults__), f"{place}'s defaults")
        for cell in function.__closure__ or ():
            # An empty cell belongs to a name that is not bound yet.
            self.value(_content(cell), f"{place}'s closure")
        names = _names(code)
        for name in sorted(names & function.__globals__.keys()):
            self._put("global", name)
            self._global(function.__globals__[name], names, name)

    def _global(self, value: Any, names: set[str], place: str) -> None:
        self.value(value, place)
        # Of a module of the user's, what this function may take from it.
        if isinstance(value, types.ModuleType) and not (is_torch(value.__name__) or is_installed(value.__name__)):
            for name in sorted(names & vars(value).keys()):
                self._put("global", name)
                self.value(vars(value)[name], f"{place}.{name}")

    def _code(self, code: types.CodeType, place: str) -> None:
        """Neither file nor line: each worker unpacks the archive to a folder of its own."""
        self._put("code", f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}")
        self.hash.update(code.co_code)
        self._put("names", repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, place)
            else:
                self.value(constant, place)


def _names(code: types.CodeType) -> set[str]:
    """Globals and attributes that code and the functions inside it mention."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in {"__dict__", "__weakref__"})


def _name(thing: Callable[..., Any] | type) -> str:
    # A model file is imported under a name that may differ from run to run; installed packages have one name.
    module = getattr(thing, "__module__", "") or ""
    known = is_torch(module) or is_installed(module)
    return f"{module}.{thing.__qualname__}" if known else thing.__qualname__
