"""Keys of a model-config.yaml by their paths."""

from collections.abc import Mapping
from typing import Any

KeyPath = tuple[str, ...]
OPENVINO: KeyPath = ("handler", "openvino")
HINT: KeyPath = ("pt2", "compile", "options", "config", "INFERENCE_PRECISION_HINT")
PRECISION: KeyPath = (*OPENVINO, "precision")


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def value_at(config: Mapping[str, Any], path: KeyPath) -> Any:
    """Returns the value of a key; None where it is not set."""
    level: Any = config
    for key in path:
        level = mapping(level).get(key)
    return level


def with_changes(config: Mapping[str, Any], changed: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration with some keys set."""
    result: dict[str, Any] = dict(config)
    for path, value in changed.items():
        level = result
        for key in path[:-1]:
            level[key] = dict(mapping(level.get(key)))
            level = level[key]
        level[path[-1]] = value
    return result
