"""Reads a YAML file and records the line of each key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchserve_openvino.config.problems import KeyPath, Problems
from torchserve_openvino.errors import ConfigError

_MERGE_TAG = "tag:yaml.org,2002:merge"
# Far above any configuration; aliases of aliases could make a short file describe more than memory holds.
_MAX_BYTES = 4 * 2**20
_MAX_VALUES = 100_000


@dataclass(frozen=True)
class Source:
    """A parsed configuration with the places of its keys.

    Attributes:
        data: The content.
        name: Its name in messages: a file's path, or a word such as ``model_yaml_config``.
        lines: Line (from 1) of each key path; empty if the content did not come from a file.
    """

    data: Mapping[Any, Any]
    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def location(self, path: KeyPath = ()) -> str:
        """Returns ``file:line`` of a key or of its nearest parent with a known line; without one, the name alone."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.name}:{line}"
        return self.name

    def problems(self) -> Problems:
        """Returns an empty list of problems that takes its places from this source."""
        return Problems(self.location)


def openvino_section(document: Any) -> Mapping[Any, Any]:
    """Returns ``handler.openvino`` of a YAML that nobody has checked; empty if it is not there, or no mapping."""
    for key in ("handler", "openvino"):
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}


class _YamlWalk:
    """A walk over the YAML nodes that records the line of every key and finds duplicate keys."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems = Problems(lambda path: f"{name}:{self.lines[path]}" if path in self.lines else name)
        self._seen: set[int] = set()

    def visit(self, node: yaml.Node, path: KeyPath = ()) -> None:
        # An aliased node is walked once: keys inside a later alias get the line of that alias.
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.ScalarNode) and not _is_text(node.value):
            self.problems.add(path, "holds a character that is no text (a lone surrogate).")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                self.visit(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            self._mapping(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first_line: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE_TAG:
                self.visit(value, path)
                continue
            if not isinstance(key, yaml.ScalarNode):
                self.lines.setdefault(path, line)
                self.problems.add(path, f"the key on line {line} is not a plain name.")
                continue
            position = (*path, key.value)
            if not _is_text(key.value):
                self.problems.add(path, f"the key on line {line} is not a plain name.")
                continue
            if key.value in first_line:
                self.lines[position] = line
                self.problems.add(position, f"duplicate key; first defined on line {first_line[key.value]}.")
                continue
            first_line[key.value] = line
            self.lines[position] = line
            self.visit(value, position)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_cyclic(node: yaml.Node, above: frozenset[int], cleared: set[int]) -> bool:
    """Checks whether an alias below a node leads back to it; nodes without a cycle are not walked again."""
    if id(node) in above:
        return True
    if id(node) in cleared or not isinstance(node, yaml.CollectionNode):
        return False
    children = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in node.value]
    below = above | {id(node)}
    if any(_is_cyclic(child, below, cleared) for child in children):
        return True
    cleared.add(id(node))
    return False


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Returns how many values there are below a node without a cycle, where each alias counts as a copy."""
    if id(node) not in counted:
        children = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [value for _, value in node.value]
        counted[id(node)] = 1 + sum(_values(child, counted) for child in children)
    return counted[id(node)]


def read_yaml(path: Path) -> Source:
    """Reads a YAML file.

    Args:
        path: The file, one YAML document with a mapping at the top level. An empty file is an empty mapping.

    Raises:
        ConfigError: The file cannot be read, is not YAML, has duplicate keys, or no mapping at the top level.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot be read: {reason}.", location=str(path)) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Source:
    """Like `read_yaml`, but for text; ``name`` replaces the path in messages."""
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"is larger than {_MAX_BYTES >> 20} MiB, which no configuration is.", location=name)
    try:
        data, lines = _load(text, name)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("is nested too deeply.", location=name) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"is not valid YAML: {error.problem or error.context}.", location=location) from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"is not valid YAML: {reason}.", location=name) from error
    except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as error:
        # PyYAML builds values that only look valid: an integer of 5,000 digits, the 99th of a month.
        raise ConfigError(f"holds a value that cannot be read: {error}.", location=name) from error
    if data is None:
        return Source({}, name)
    if not isinstance(data, dict):
        raise ConfigError(
            f"must be a mapping at the top level, not a value of type {type(data).__name__}.", location=name
        )
    return Source(data, name, lines)


def _load(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        walk = _YamlWalk(name)
        walk.visit(node)
        walk.problems.raise_if_any(name)
        if _is_cyclic(node, frozenset(), set()):
            raise ConfigError("an alias contains itself.", location=name)
        if (count := _values(node, {})) > _MAX_VALUES:
            raise ConfigError(f"describes {count} values, aliases counted, more than {_MAX_VALUES}.", location=name)
        return loader.construct_document(node), walk.lines
    finally:
        loader.dispose()
