"""Modules and methods that a handler calls directly: a submodule, a second model, one inside a pipeline."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchserve_openvino.config.spelling import nearest
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.observation.methods import method_graph

KEY = "handler.openvino.compile"
_STEP = re.compile(r"\.?(\w+)|\[(\d+)\]")
# Depth to which other objects, such as pipelines and lists of models, are searched for modules.
_DEPTH = 3
# Attributes of every handler that hold no models, or the root under another name.
_OURS = frozenset({"_openvino", "context", "manifest"})


def part_at(handler: Any, path: str) -> nn.Module:
    """Returns the module that a path such as ``model.encoder``, ``pipe.unet`` or ``models[0]`` names.

    For a method of a module (``pipe.vae.decode``) it is a `MethodGraph`.

    Raises:
        ModelLoadError: The path names neither.
    """
    value, done = handler, "self"
    for match in _STEP.finditer(path):
        name = match[1] or match[2]
        member = _member(value, name)
        if member is None:
            hint = nearest(name, _names(value))
            near = f" Did you mean {hint!r}?" if hint else ""
            raise ModelLoadError(f"{KEY} names {path!r}, but {done} has no {name!r}.{near}")
        value, done = member[0], f"{done}{match[0] if match[0][0] in '.[' else '.' + match[0]}"
    if isinstance(value, nn.Module):
        return value
    outer, _, name = path.rpartition(".")
    if name == "forward" and isinstance(getattr(value, "__self__", None), nn.Module):
        raise ModelLoadError(f"{KEY} names {path!r}: name the module itself, {outer!r}.")
    method = method_graph(value, name)
    if method is not None:
        return method
    raise ModelLoadError(
        f"{KEY} names {path!r}, which is {_kind(value)}, not a torch.nn.Module or a method of one that computes."
    )


def _kind(value: Any) -> str:
    owner = getattr(value, "__self__", None)
    if callable(value) and owner is not None and not isinstance(owner, type):
        return f"a method of {type(owner).__name__}"
    return f"a {type(value).__name__}"


def _member(value: Any, name: str) -> tuple[Any] | None:
    if isinstance(value, Mapping) and name in value:
        return (value[name],)
    if name.isdecimal() and hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return (value[int(name)],) if int(name) < len(value) else None
    if isinstance(value, nn.ModuleDict) and name in value:
        return (value[name],)
    return (getattr(value, name),) if hasattr(value, name) else None


def _names(value: Any) -> list[str]:
    names: list[str] = []
    if isinstance(value, nn.Module):
        names = [name for name, _ in value.named_children()]
        names += [name for name in dir(type(value)) if not name.startswith("_") and not hasattr(nn.Module, name)]
    return names + [str(name) for name in getattr(value, "__dict__", {})]


def paths_of(handler: Any, root: Any) -> dict[int, str]:
    """Returns the path of each module that a handler holds, by `id`: ``model.encoder``, ``pipe.unet``.

    Args:
        handler: The handler.
        root: The eager model that its ``model`` stands for.
    """
    paths: dict[int, str] = {}
    if isinstance(root, nn.Module):
        _name(root, "model", paths)
    for name, value in vars(handler).items():
        if name not in _OURS and not (name == "model" and paths):
            for path, module in _modules(value, name, _DEPTH, set()):
                _name(module, path, paths)
    return paths


def _name(module: nn.Module, path: str, paths: dict[int, str]) -> None:
    for name, part in module.named_modules():
        paths.setdefault(id(part), f"{path}.{name}" if name else path)


def _modules(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (str, bytes, type)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        members = [(f"{path}.{key}", item) for key, item in value.items() if isinstance(key, str)]
    elif isinstance(value, (list, tuple)):
        members = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        members = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for name, value_ in members:
        yield from _modules(value_, name, depth - 1, seen)
