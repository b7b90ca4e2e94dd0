"""What this package takes from TorchScript's private interface: inlined graphs, and operators by their schema."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_FILE_WORDS = ("file", "path")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def inlined_graph(method: Any) -> Any:
    """Returns a copy of the graph of a method or function, with all calls of other TorchScript methods inlined."""
    graph = method.graph.copy()
    torch._C._jit_pass_inline(graph)
    return graph


def method_of(module: torch.nn.Module, name: str) -> Any:
    """Returns a compiled method of a TorchScript module; None if it has none of this name."""
    inner: Any = module._c
    return inner._get_method(name) if name in inner._method_names() else None


def has_script_hooks(module: torch.nn.Module) -> bool:
    """Returns True for a TorchScript module with hooks that are TorchScript as well; it has no others."""
    inner: Any = module._c
    return bool(inner._get_forward_hooks() or inner._get_forward_pre_hooks())


def parsed_schema(node: Any) -> Any:
    """Returns the schema of a graph's node: name, overload and arguments; None for nodes without one."""
    text = node.schema()
    return torch._C.parse_schema(text) if text and text != "(no schema)" else None


def is_dispatched(name: str, overload: str) -> bool:
    """Returns True for an operator of torch's dispatcher, False for one that only TorchScript's interpreter has."""
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def source_of(node: Any) -> str:
    """Returns ``file:line`` of the user's code behind a node: the innermost one outside torch; empty if unknown."""
    # The lines of the original source come first; those of the archive's own copy follow "Serialized".
    places = _PLACE.findall(str(node.sourceRange()))
    own = [line for line in places if "/torch/" not in line[0]]
    chosen = own or places
    return f"{chosen[0][0]}:{chosen[0][1]}" if chosen else ""


def opens_files(name: str) -> bool:
    """Returns True for an operator, such as ``aten::save``, that takes the name of a file."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return any(takes_file(schema.arguments) for schema in schemas)


def takes_file(arguments: Iterable[Any]) -> bool:
    """Returns True if one of the arguments of an operator's schema is the name of a file."""
    return any(
        "str" in str(argument.type) and any(word in argument.name for word in _FILE_WORDS) for argument in arguments
    )


def attribute_of(module: torch.nn.Module, name: str) -> Any:
    """Returns an attribute that TorchScript itself has of a module: faster than `getattr`, which asks Python first."""
    inner: Any = module._c
    return inner.getattr(name)


def record_sizes(path: Path) -> dict[str, int]:
    """Returns the size of each member of an archive, by its name without the folder that all are in, as torch reads it.

    Raises:
        RuntimeError: torch can't read it.
    """
    reader = torch._C.PyTorchFileReader(str(path))
    return {name: reader.get_record_size(name) for name in reader.get_all_records()}
