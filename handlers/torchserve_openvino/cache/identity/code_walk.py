"""Hashes classes and functions for a model's fingerprint: byte code, constants, and what the code refers to by name."""

import abc
import builtins
import dis
import functools
import sys
import types
from typing import Any

from blake3 import blake3

from torchserve_openvino.cache.identity.provenance import is_installed, is_library, is_torch, source_digest, version

_CLASS_BOOKKEEPING = frozenset(
    {
        "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__abstractmethods__",
        "__static_attributes__", "__parameters__", "__orig_bases__", "_abc_impl", "__annotate__", "__annotate_func__",
    }
)  # fmt: skip
# Names that read the process's environment variables, which are not part of any digest.
_ENVIRONMENT = frozenset({"environ", "getenv", "environb", "getenvb"})


class CodeWalk(abc.ABC):
    """Base of the fingerprint's walk: hashes code; a subclass hashes all other values that code refers to.

    Attributes:
        hash: Running hash of everything visited.
        unknown: Descriptions of what could not be made part of the hash.
    """

    def __init__(self) -> None:
        self.hash = blake3()
        self.unknown: list[str] = []
        self._modules_seen: set[tuple[str, frozenset[str]]] = set()
        self._scanned: set[str] = set()

    def put(self, kind: str, text: str = "") -> None:
        """Adds text together with its length, so that different sequences of texts give different bytes."""
        self.hash.update(f"{kind}:{len(text)}:{text};".encode(errors="surrogatepass"))

    @abc.abstractmethod
    def value(self, value: Any, where: str) -> None:
        """Adds any value; ``where`` names it in messages."""

    # --- classes ------------------------------------------------------------------------------------------------

    def klass(self, cls: type, where: str) -> None:
        """Adds a class: a user's by all its members, an installed one by version, file digest and patched functions."""
        self.put("class", name_of(cls))
        for base in cls.__mro__:
            if not is_library(base):
                self._own_class(base)
                continue
            self.put("base", name_of(base))
            self.replaced_in(base.__module__)
            if not is_torch(base.__module__) and base is not object:
                self.put("version", f"{version(base.__module__)} {source_digest(base.__module__)}")
            self._patches(base)

    def _own_class(self, cls: type) -> None:
        self.put("own class", name_of(cls))
        for name, item in sorted(vars(cls).items()):
            if name in _CLASS_BOOKKEEPING or isinstance(item, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                continue
            self.put("member", name)
            self.value(item, f"{cls.__qualname__}.{name}")

    def _patches(self, cls: type) -> None:
        """Adds user functions that were patched into an installed class."""
        for name, item in sorted(vars(cls).items()):
            function = getattr(item, "__func__", item)
            if _is_foreign(function):
                self.put("patched", name)
                self.value(function, f"{cls.__qualname__}.{name}")

    def replaced_in(self, module: str) -> None:
        """Adds user functions that replace those of an installed module; scans each module once."""
        if module in self._scanned or module not in sys.modules or module == "builtins":
            return
        self._scanned.add(module)
        for name, item in sorted(vars(sys.modules[module]).items()):
            if _is_foreign(item):
                self.put("replaced", f"{module}.{name}")
                self.value(item, f"{module}.{name}")
            elif is_torch(module) and (other := _other_name(name, item)):
                self.put("other name", f"{module}.{name} {other}")

    # --- functions ----------------------------------------------------------------------------------------------

    def function(self, function: types.FunctionType, where: str) -> None:
        """Adds a function: a user's with everything that it refers to, an installed one by name and version."""
        if _library_code(function) and is_library(function):
            self.put("function", f"{name_of(function)} {version(function.__module__ or '')}")
            return
        self.put("own function")
        code = function.__code__
        self.code(code, where)
        self.value((function.__defaults__, function.__kwdefaults__), f"{where}'s defaults")
        for cell in function.__closure__ or ():
            # An empty cell belongs to a name that is not bound yet.
            self.value(_content(cell), f"{where}'s closure")
        for name, item in sorted(vars(function).items()):
            self.put("attribute", name)
            self.value(item, f"{where}.{name}")
        names = _names(code)
        if _ENVIRONMENT & names:
            self.unknown.append(f"{where}, which reads the environment")
        for name in sorted(names & function.__globals__.keys()):
            self.put("global", name)
            self._global(function.__globals__[name], names, name)
        for name in sorted(_imports(code)):
            self._imported(name, function, names)

    def code(self, code: types.CodeType, where: str) -> None:
        """Adds byte code without file name and lines, because each worker unpacks the archive to its own folder."""
        self.put("code", f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}")
        self.hash.update(code.co_code)
        # From Python 3.11 on, what a `try` covers.
        self.hash.update(getattr(code, "co_exceptiontable", b""))
        self.put("names", repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, where)
            else:
                self.value(constant, where)

    def _global(self, value: Any, names: frozenset[str], where: str) -> None:
        if not isinstance(value, types.ModuleType):
            self.value(value, where)
            return
        self.put("python module", f"{value.__name__} {version(value.__name__)}")
        if is_torch(value.__name__) or is_installed(value.__name__):
            self._replaced_by_name(value, names)
            return
        # From a user's module, add only what this function may use of it, and of the modules in it.
        if (value.__name__, names) in self._modules_seen:
            return
        self._modules_seen.add((value.__name__, names))
        content = vars(value)
        looks_up = "getattr" in names or "vars" in names or "__dict__" in names
        reached = [name for name in content if not name.startswith("__")] if looks_up else names & content.keys()
        for name in sorted(reached):
            self.put("global", name)
            self._global(content[name], names, f"{where}.{name}")

    def _replaced_by_name(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Adds user functions that a function takes from an installed module, where they replace the module's own."""
        if (module.__name__, names) in self._modules_seen:
            return
        self._modules_seen.add((module.__name__, names))
        for name in sorted(names & vars(module).keys()):
            item = vars(module)[name]
            if _is_foreign(item):
                self.put("replaced", f"{module.__name__}.{name}")
                self.value(item, f"{module.__name__}.{name}")
            elif isinstance(item, types.ModuleType):
                self._replaced_by_name(item, names)

    def _imported(self, name: str, function: types.FunctionType, names: frozenset[str]) -> None:
        """Adds a module that is imported inside a function."""
        package = function.__globals__.get("__package__") or ""
        candidates = (name, f"{package}.{name}") if name else (package,)
        module = next((sys.modules[full] for full in candidates if full in sys.modules), None)
        self.put("import", name)
        if module is not None:
            self._global(module, names, name)
        elif not is_installed(name.partition(".")[0]) and name.partition(".")[0] not in sys.stdlib_module_names:
            self.unknown.append(f"{name}, which is imported when the model runs")


def name_of(thing: Any) -> str:
    """Returns a name that is the same in every process; without the module for user code, whose module name varies."""
    qualname = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{thing.__module__}.{qualname}" if is_library(thing) else str(qualname)


def _is_foreign(item: Any) -> bool:
    """Whether an attribute of an installed module or class is a user's callable that was patched in."""
    if isinstance(item, functools.partial):
        return _is_foreign(item.func)
    item = getattr(item, "__func__", item)
    if isinstance(item, types.FunctionType):
        return not (_library_code(item) and is_library(item))
    # An instance of a user's class that defines ``__call__``.
    return not isinstance(item, type) and callable(item) and not is_library(type(item))


def _other_name(name: str, item: Any) -> str:
    """Returns the original name of a torch function bound to another name, as after ``F.relu = F.gelu``; else empty."""
    own = getattr(item, "__name__", name)
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return f"{getattr(item, '__module__', '')}.{own}" if isinstance(item, kinds) and own != name else ""


def _library_code(function: types.FunctionType) -> bool:
    """Whether the function is defined in an installed module; a decorator may have changed its ``__module__``."""
    module = function.__globals__.get("__name__")
    if not isinstance(module, str) or function.__globals__ is vars(builtins):
        return False
    return module != "builtins" and (is_torch(module) or is_installed(module))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Returns the globals and attributes to which code and its nested functions refer."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[str]:
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _imports(constant)
    return frozenset(names)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
