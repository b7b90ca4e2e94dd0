"""Finds a model's weights in what a training script saved: under a key, with a prefix before each name."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchserve_openvino.config.sections.openvino_section import WeightsSection
from torchserve_openvino.errors import ModelLoadError

KEY = "handler.openvino.weights"
# Levels of dictionaries in which weights are looked for, and the most of them: real files have a dozen.
_DEPTH = 3
_DICTIONARIES = 100
_SHOWN = 5
# Of DataParallel and DistributedDataParallel; of torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")


def select_state(stored: Any, section: WeightsSection, file: str) -> Any:
    """Returns the part of a checkpoint that `handler.openvino.weights` names.

    Args:
        stored: What the file holds.
        section: The keys of the YAML.
        file: Name of the file, for messages.

    Raises:
        ModelLoadError: There is no such key, or no name has the prefix.
    """
    state = stored if section.key is None else _at(stored, section.key, file)
    prefix = section.strip_prefix
    if prefix is None:
        return state
    if not isinstance(state, Mapping):
        raise ModelLoadError(f"{KEY}.strip_prefix: {file} holds a {type(state).__name__} there, not a state_dict.")
    names = [str(name) for name in state]
    if not any(name.startswith(prefix) for name in names):
        raise ModelLoadError(
            f"{KEY}.strip_prefix: no weight in {file} has a name that begins with {prefix!r}; it has {_some(names)}."
        )
    stripped = {name.removeprefix(prefix): value for name, value in zip(names, state.values(), strict=True)}
    if len(stripped) != len(names):
        raise ModelLoadError(f"{KEY}.strip_prefix: without {prefix!r}, two weights in {file} have the same name.")
    return stripped


def advice(stored: Any, own: Mapping[str, Any]) -> str | None:
    """Returns which keys of the YAML make a checkpoint fit a model; None if none do.

    Args:
        stored: What the file holds.
        own: The model's state_dict.
    """
    if not own:
        return None
    choices = []
    for key, state in _states(stored):
        prefix = _prefix({str(name): value for name, value in state.items()}, own)
        if prefix is not None and (key or prefix):
            parts = [f"key: {key}"] if key else []
            parts += [f'strip_prefix: "{prefix}"'] if prefix else []
            choices.append(f"{{{', '.join(parts)}}}")
    if not choices:
        return None
    which = " or ".join(choices[:_SHOWN])
    return f"The file holds weights that fit: set {KEY}: {which} in the YAML."


def wrapper_prefix(stored: Any) -> str | None:
    """Returns what a wrapper of PyTorch has put before each name in a state_dict; None if no such thing is there."""
    if not isinstance(stored, Mapping) or not stored:
        return None
    return next((prefix for prefix in _WRAPPERS if all(str(name).startswith(prefix) for name in stored)), None)


def _at(stored: Any, key: str, file: str) -> Any:
    """Returns the value under a key, which may be one of nested ones, joined by dots."""
    value = stored
    rest = key
    while rest:
        if not isinstance(value, Mapping):
            value = None
            break
        # A name may itself have dots; the longest one is meant.
        name = next((name for name in _beginnings(rest) if name in value), None)
        if name is None:
            value = None
            break
        value, rest = value[name], rest[len(name) + 1 :]
    if isinstance(value, Mapping):
        return value
    keys = [name for name, _ in _states(stored) if name]
    if not keys and isinstance(stored, Mapping):
        keys = [str(key) for key in stored]
    contents = f"it has {_some(keys)}" if keys else "it has no keys"
    raise ModelLoadError(f"{KEY}.key: {file} has no state_dict under {key!r}; {contents}.")


def _beginnings(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _states(stored: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yields each dictionary with tensors, by its key: that of the file itself is empty."""
    level: list[tuple[str, Any]] = [("", stored)]
    seen = 0
    for _ in range(_DEPTH):
        inner: list[tuple[str, Any]] = []
        for key, value in level:
            if not isinstance(value, Mapping) or seen >= _DICTIONARIES:
                continue
            seen += 1
            if any(isinstance(item, torch.Tensor) for item in value.values()):
                yield key, value
            inner += [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
        level = inner


def _prefix(state: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Returns what has to be removed from names so that weights are a model's; None if they are not."""
    first = min(own)
    prefixes = {name.removesuffix(first) for name in state if name.endswith(first)}
    return next((prefix for prefix in sorted(prefixes, key=len) if _fits(state, own, prefix)), None)


def _fits(state: Mapping[str, Any], own: Mapping[str, Any], prefix: str) -> bool:
    pairs = ((value, state.get(f"{prefix}{name}")) for name, value in own.items())
    return all(getattr(one, "shape", None) == getattr(other, "shape", ()) for one, other in pairs)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
