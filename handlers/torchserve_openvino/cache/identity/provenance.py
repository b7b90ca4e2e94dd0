"""Where a Python module comes from: the user, an installed package, or Python itself."""

import builtins
import functools
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

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
