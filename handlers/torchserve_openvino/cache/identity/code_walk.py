"""Hashes classes and functions for a model's fingerprint: byte code, constants, and what the code refers to by name."""

import abc
import builtins
import dis
import functools
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

_CLASS_BOOKKEEPING = frozenset(
    {
        "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__abstractmethods__",
        "__static_attributes__", "__parameters__", "__orig_bases__", "_abc_impl", "__annotate__", "__annotate_func__",
    }
)  # fmt: skip
# Names that read the process's environment variables, which are not part of any digest.
_ENVIRONMENT = frozenset({"environ", "getenv", "environb", "getenvb"})
# Names of functions that find others by texts, which no digest follows.
_BY_TEXT = frozenset({"eval", "exec", "globals"})


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
            self._registered(f"{module}.{name}", item)

    def _registered(self, where: str, item: Any) -> None:
        """Adds user functions in a library's registry: a plain dictionary of a module or of a class."""
        tables = [(where, item)]
        if isinstance(item, type):
            tables = [(f"{where}.{name}", value) for name, value in vars(item).items()]
        for table, entries in tables:
            if type(entries) is dict:
                for key, value in entries.items():
                    if isinstance(key, str) and _is_foreign(value):
                        self.put("registered", f"{table}[{key}]")
                        self.value(value, f"{table}[{key}]")

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
        if looks_up := _BY_TEXT & names:
            self.unknown.append(f"{where}, which calls {min(looks_up)}")
        for name in sorted(names & function.__globals__.keys()):
            self.put("global", name)
            self._global(function.__globals__[name], names, name)
        for level, name in sorted(_imports(code)):
            self._imported(level, name, function, names)

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

    def _imported(self, level: int, name: str, function: types.FunctionType, names: frozenset[str]) -> None:
        """Adds a module that is imported inside a function; ``level`` is the number of dots before its name."""
        full = name
        if level:
            packages = str(function.__globals__.get("__package__") or "").split(".")
            parent = ".".join(packages[: len(packages) - level + 1])
            full = f"{parent}.{name}" if name else parent
        module, top = sys.modules.get(full), full.partition(".")[0]
        self.put("import", "." * level + name)
        if module is not None:
            self._global(module, names, name)
        elif not is_installed(top) and top not in sys.stdlib_module_names:
            self.unknown.append(f"{name}, which is imported when the model runs")


def name_of(thing: Any) -> str:
    """Returns a name that is the same in every process; without the module for user code, whose module name varies."""
    qualname = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{thing.__module__}.{qualname}" if is_library(thing) else str(qualname)


_OWN = f"{__name__.partition('.')[0]}."


def _is_foreign(item: Any) -> bool:
    """Whether an attribute of an installed module or class is a user's callable that was patched in."""
    if isinstance(item, functools.partial):
        return _is_foreign(item.func)
    item = getattr(item, "__func__", item)
    if isinstance(item, types.FunctionType):
        # What this package itself replaces (`_torch_kept.py`) changes with its version.
        own = str(item.__globals__.get("__name__")).startswith(_OWN)
        return not own and not (_library_code(item) and is_library(item))
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


# They belong to the next instruction, or to none.
_PREFIXES = frozenset({"EXTENDED_ARG", "CACHE", "NOP"})


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[tuple[int, str]]:
    """Returns the number of dots and the name of each module that a function imports."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _PREFIXES]
    # The level and the list of names are loaded before.
    names = {
        (int(level.argval), str(step.argval))
        for level, step in zip(steps, steps[2:], strict=False)
        if step.opname == "IMPORT_NAME"
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _imports(constant)
    return frozenset(names)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# --- the code in Python source: what is left without comments, docstrings and blank lines, which change no result
# Done by regular expressions, not by Python's own parser: that takes ten times as long, at each start of a worker, and
# its output differs between versions of Python, which share entries.


# A comment, or a string with its prefix, of three quotes or of one.
_TOKEN = re.compile(
    r"#[^\n]*"
    r"|[A-Za-z]{0,2}(?:"
    r'"""(?:[^"\\]|\\.|"(?!""))*"""'
    r"|'''(?:[^'\\]|\\.|'(?!''))*'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'"
    r")",
    re.DOTALL,
)
_IDLE = re.compile(r"[ \t]+(?=\n)|\n(?=[ \t]*(?:\n|\Z))")
_LINE_END = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")


def code_of(source: str) -> str:
    """Returns source without comments, docstrings and blank lines; what is in other strings stays."""
    # Code and strings in turn: only code is normalized.
    parts: list[str] = []
    code, end, depth = "", 0, 0
    for token in _TOKEN.finditer(source):
        between = source[end : token.start()]
        code += between
        depth += sum(map(between.count, "([{")) - sum(map(between.count, ")]}"))
        end = token.end()
        if not (token[0].startswith("#") or (not depth and _is_docstring(parts, code, source, end))):
            parts += [_IDLE.sub("", code), token[0]]
            code = ""
    parts.append(_IDLE.sub("", code + source[end:]))
    return "".join(parts).lstrip("\n")


def _is_docstring(parts: list[str], code: str, source: str, end: int) -> bool:
    """Returns True if a string outside brackets is a statement, the first one of a file or behind a colon.

    Args:
        parts: What comes before ``code``.
        code: The code between the previous string and this one.
        source: The source.
        end: Where the string ends.
    """
    before, _, indent = code.rpartition("\n")
    before = before.rstrip()
    first = before.endswith(":") if before else not parts
    return first and not indent.strip() and _LINE_END.match(source, end) is not None


def digest_of_files(root: Path, paths: Iterable[Path]) -> str:
    """Returns a digest of the code in files, and of their paths below ``root``.

    Raises:
        FileNotFoundError: A file is missing.
    """
    digest = blake3()
    for path in paths:
        code = code_of(path.read_text(encoding="utf-8")).encode()
        digest.update(f"{path.relative_to(root).as_posix()}:{len(code)};".encode())
        digest.update(code)
    return digest.hexdigest(length=8)


# --- where a Python module comes from: the user, an installed package, or Python itself ---------------------------


# CPython's flag of classes that Python code made (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9
_LIBRARIES = ("purelib", "platlib", "stdlib", "platstdlib")


def is_torch(module: str) -> bool:
    """Whether a module is part of torch, and so is identified by torch's version."""
    return module == "torch" or module.startswith("torch.")


def is_library(thing: Any) -> bool:
    """Whether a class or function belongs to Python, torch or another installed package."""
    module = getattr(thing, "__module__", None)
    if not isinstance(module, str):
        return False
    if module == "builtins":
        # A class that was created by `exec` has this module as well.
        name = getattr(thing, "__qualname__", "")
        return (
            getattr(builtins, name.partition(".")[0], None) is not None
            or not isinstance(thing, type)
            or _made_in_c(thing)
        )
    return is_torch(module) or is_installed(module)


def _made_in_c(cls: type) -> bool:
    """Whether a class is built into Python but has no name in ``builtins``, such as the type of functions."""
    return not cls.__flags__ & _HEAP_TYPE


@functools.lru_cache(maxsize=4096)
def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package or to Python itself, and so is identified by version."""
    if module == "builtins" or module in sys.builtin_module_names:
        return True
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        # A submodule that is compiled into another extension module has no file.
        top = module.partition(".")[0]
        return top != module and top in sys.modules and is_installed(top)
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(Path(file).is_relative_to(sysconfig.get_path(name)) for name in _LIBRARIES)


@functools.lru_cache(maxsize=1024)
def version(module: str) -> str:
    """Returns the version of the package that a module belongs to; empty if it has none."""
    top = module.partition(".")[0]
    stated = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(stated, str):
        return stated
    try:
        return metadata.version(top) if is_installed(top) and top not in sys.stdlib_module_names else ""
    except metadata.PackageNotFoundError:
        return ""


@functools.lru_cache(maxsize=1024)
def source_digest(module: str) -> str:
    """Returns the digest of a module's file; empty if it has no file, and for the standard library."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] in sys.stdlib_module_names or file is None or not Path(file).is_file():
        return ""
    return blake3(Path(file).read_bytes()).hexdigest()
