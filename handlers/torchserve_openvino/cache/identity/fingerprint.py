"""Identifies what a model computes by two digests, without tracing it: of its code and settings, and of its weights.

Capturing the graph with Dynamo would take seconds. Instead, the module tree is walked: class by class, attribute by
attribute, and through every user function that ``forward`` reaches, with the constants, defaults, closures and globals
that it reads. Code of installed packages is identified by version, and by content for the files that define the
model's classes. What cannot be identified is listed, and a model with such parts is always traced.
"""

import collections
import copyreg
import enum
import functools
import logging
import threading
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from torchserve_openvino.cache.identity.code_walk import CodeWalk, is_library, name_of
from torchserve_openvino.cache.identity.key import digest
from torchserve_openvino.cache.identity.weights_digest import tensor_digest, weights_digest
from torchserve_openvino.ops.mappings import Mappings

# Plain values that their repr fully describes: instances of exactly these classes, or also of subclasses (`_BY_TEXT`).
_EXACT = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice})
_BY_TEXT = (
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.generic, np.dtype,
)  # fmt: skip
_SCALARS = (int, float, complex, str, bytes)
_PLAIN_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, collections.OrderedDict, collections.deque})
# They do not affect results.
_IGNORED = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
# Attributes of a torch.nn.Module that are walked separately, or are torch's own bookkeeping.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl", "_is_torch_compile"})

# Namespaces in which models and torch's own modules look up functions.
_TORCH_FUNCTIONS = (
    "torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._special",
    "torch._C._fft", "torch._VF", "torch.special", "torch.linalg", "torch.fft", "torch._tensor",
)  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model.

    Attributes:
        code: Digest of code, settings and structure.
        weights: Digest of parameters and buffers: names, types, shapes, strides, content.
        unknown: What could not be made part of them; unless it is empty, different models may share a digest.
    """

    code: str
    weights: str
    unknown: tuple[str, ...] = ()


def fingerprint(model: Any) -> Fingerprint:
    """Computes the digests of a model: a module or any other callable.

    Takes about 0.3 s for each GB of weights, and milliseconds for the rest.
    """
    try:
        walk = _ModelWalk(model)
        walk.value(model, type(model).__name__)
        walk.torch_itself()
        weights = weights_digest(model)
    except Exception as error:
        # The user's objects may raise anything; a model that cannot be walked is traced, which always works.
        text = f"{type(model).__name__} ({type(error).__name__} while it was read: {str(error)[:100]})"
        return Fingerprint("", "", (text,))
    return Fingerprint(walk.hash.hexdigest(), weights, tuple(dict.fromkeys(walk.unknown)))


class _ModelWalk(CodeWalk):
    """One pass over everything that is reachable from a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}
        # Keeps visited objects alive, so that no id is reused during the walk.
        self._alive: list[Any] = []
        # Modules whose weights are covered by the weights digest.
        self._covered = {id(module) for module in model.modules()} if isinstance(model, torch.nn.Module) else set()

    def torch_itself(self) -> None:
        """Adds what the process patched into torch, however the model may reach it."""
        for module in _TORCH_FUNCTIONS:
            self.replaced_in(module)
        self.klass(torch.Tensor, "torch.Tensor")
        self.klass(torch.nn.Module, "torch.nn.Module")
        hooks = torch.nn.modules.module
        for name in sorted(vars(hooks)):
            # Global module hooks. Their keys come from a counter of the process and are left out.
            if name.startswith("_global") and isinstance(table := vars(hooks)[name], Mapping):
                self.put("hooks", name)
                self.value(list(table.values()), name)

    def value(self, value: Any, where: str) -> None:
        """Adds any value; ``where`` names it in messages."""
        if type(value) in _EXACT or isinstance(value, _BY_TEXT):
            self.put(type(value).__name__, repr(value))
        elif isinstance(value, _IGNORED):
            return
        elif id(value) in self._seen:
            self.put("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._compound(value, where)

    def _compound(self, value: Any, where: str) -> None:
        if isinstance(value, enum.Enum):
            self.put("enum", f"{name_of(type(value))}.{value.name}")
            self.value(value.value, where)
            self.value(type(value), where)
        elif isinstance(value, torch.Tensor):
            self.put("tensor", tensor_digest(value))
        elif isinstance(value, np.ndarray):
            self._array(value, where)
        elif isinstance(value, _SCALARS):
            self.put("scalar", repr(next(cls for cls in _SCALARS if isinstance(value, cls)).__repr__(value)))
            self._extras(value, where)
        elif isinstance(value, (list, tuple, collections.deque, set, frozenset, Mapping)):
            self._container(value, where)
            self._extras(value, where)
        elif isinstance(value, torch.nn.Module):
            self._module(value, where)
        elif isinstance(value, types.ModuleType):
            self._global(value, frozenset(), where)
        elif isinstance(value, type):
            self.klass(value, where)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.put("operator", str(value))
        elif isinstance(value, weakref.ref):
            self.value(value(), where)
        else:
            self._callable_or_object(value, where)

    def _container(self, value: Any, where: str) -> None:
        self.put(name_of(type(value)), str(len(value)))
        if isinstance(value, (set, frozenset)):
            digests = []
            for item in value:
                # A set has no order: its items are hashed one by one and their digests sorted.
                alone = _ModelWalk(None)
                alone.value(item, where)
                self.unknown += alone.unknown
                digests.append(alone.hash.hexdigest())
            self.put("items", "".join(sorted(digests)))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.value(key, where)
                self.value(item, f"{where}[{key!r}]")
            self.value(getattr(value, "default_factory", None), where)
        else:
            for i, item in enumerate(value):
                self.value(item, f"{where}[{i}]")

    def _array(self, value: np.ndarray[Any, Any], where: str) -> None:
        self.put("array", f"{value.dtype}{value.shape}")
        if value.dtype.hasobject:
            self.value(value.tolist(), where)
        else:
            self.hash.update(np.ascontiguousarray(value).tobytes())

    def _extras(self, value: Any, where: str) -> None:
        """Adds what a subclass adds to the builtin class that it derives from."""
        if type(value) not in _PLAIN_CONTAINERS:
            self.value(type(value), where)
            self._attributes(value, where)

    def _callable_or_object(self, value: Any, where: str) -> None:
        if isinstance(value, types.FunctionType):
            self.function(value, where)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, where)
            self.value(value.__self__, where)
        elif isinstance(value, (staticmethod, classmethod)):
            self.put(type(value).__name__)
            self.value(value.__func__, where)
        elif isinstance(value, property):
            self.value((value.fget, value.fset), where)
        elif isinstance(value, functools.partial):
            self.value((value.func, value.args, value.keywords), where)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.value(value.__wrapped__, where)
        elif isinstance(value, types.CodeType):
            self.code(value, where)
        elif isinstance(value, _BUILTINS):
            self.put("builtin", f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}")
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, types.ModuleType):
                self.value(owner, where)
        else:
            self._object(value, where)

    def _object(self, value: Any, where: str) -> None:
        """Adds an instance of any other class, by its attributes."""
        self.put("object", name_of(type(value)))
        if self._attributes(value, where):
            self.value(type(value), where)
            if is_library(type(value)) and type(value).__module__ == "_collections":
                self.unknown.append(f"{where} ({name_of(type(value))})")
            return
        # Without attributes visible to Python, it is identified by what pickle would store of it: compiled regular
        # expressions and annotations such as `int | None` are registered there.
        if (reduce := copyreg.dispatch_table.get(type(value))) is not None:
            reduced = reduce(value)
            self.value(list(reduced[1:]) if isinstance(reduced, tuple) else reduced, where)
            return
        # Or by its repr, if its class defines how to pickle it.
        text = repr(value)
        opaque = type(value).__reduce__ is object.__reduce__ and type(value).__reduce_ex__ is object.__reduce_ex__
        if opaque or " at 0x" in text:
            self.unknown.append(f"{where} ({name_of(type(value))})")
        else:
            self.put("text", text)

    def _attributes(self, value: Any, where: str) -> bool:
        """Adds the attributes; returns whether the object can have any."""
        slots = [name for cls in type(value).__mro__ for name in slots_of(cls) if hasattr(value, name)]
        attributes = getattr(value, "__dict__", None)
        for name in sorted({*(attributes or ()), *slots}):
            self.put("attribute", name)
            self.value(getattr(value, name, None) if name in slots else (attributes or {})[name], f"{where}.{name}")
        return attributes is not None or bool(slots)

    def _module(self, module: torch.nn.Module, where: str) -> None:
        self.put("module", name_of(type(module)))
        self.value(type(module), where)
        for name, item in sorted(vars(module).items()):
            # What only redirects calls of the module says by itself that the module computes the same without it.
            if name in _MODULE_TABLES or getattr(type(item), "IS_TRANSPARENT", False) is True:
                continue
            self.put("attribute", name)
            # The keys of hooks come from a counter of the process and are left out.
            self.value(
                list(item.values()) if "_hooks" in name and isinstance(item, Mapping) else item, f"{where}.{name}"
            )
        for kind in ("_parameters", "_buffers"):
            table: dict[str, torch.Tensor | None] = getattr(module, kind)
            self.put(kind, repr([(name, t is not None, type(t).__name__) for name, t in table.items()]))
            if id(module) not in self._covered:
                # Not a submodule of the model, so the weights digest does not cover its weights.
                for tensor in table.values():
                    self.value(tensor, where)
        for name, child in module._modules.items():
            self.put("child", name)
            self.value(child, f"{where}.{name}")


def slots_of(cls: type) -> tuple[str, ...]:
    """Returns the attributes that a class keeps in slots, by the names under which they are found."""
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(_mangled(name, cls) for name in names if name not in {"__dict__", "__weakref__"})


def _mangled(name: str, cls: type) -> str:
    """Returns the attribute behind a slot: Python adds the class's name to a private one."""
    private = name.startswith("__") and not name.endswith("__") and cls.__name__.strip("_")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


# --- the user's operator mappings as a part of the cache's key ----------------------------------------------------


def mappings_digest(mappings: Mappings) -> tuple[str, tuple[str, ...]]:
    """Computes a digest of the registered functions and of the content of extension libraries.

    Returns:
        The digest, empty without mappings; and what could not be made part of it: if anything, nothing may be cached.
    """
    if not mappings:
        return "", ()
    unknown: list[str] = []
    content: dict[str, object] = {}
    functions = {**mappings.ops, **{_name(cls): module.convert for cls, module in mappings.modules.items()}}
    for name, convert in functions.items():
        print_ = fingerprint(convert)
        unknown += [f"the mapping of {name} ({what})" for what in print_.unknown]
        content[name] = [print_.code, print_.weights]
    content |= {_name(cls): [content[_name(cls)], module.outputs] for cls, module in mappings.modules.items()}
    for number, library in enumerate(mappings.libraries):
        content[f"library {number} {library.name}"] = blake3(library.read_bytes()).hexdigest()
    return digest(content), tuple(unknown)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
