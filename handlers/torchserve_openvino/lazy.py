"""`attributes_of`: a package's names, each imported on first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attributes_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package.

    Args:
        package: The package's ``__name__``.
        homes: The module of each name.
    """

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
