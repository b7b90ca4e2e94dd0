"""Adds entries to lists in a YAML text and leaves every other character as it is: comments, quotes, order, line ends.

The text is not parsed and dumped again, because a round trip moves comments and drops anchors; the entries are
inserted at the position where PyYAML says that a node ends.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from torchserve_openvino.config.yaml_source import parse_yaml
from torchserve_openvino.errors import ConfigError

_INDENT = 2


class Addition(NamedTuple):
    """What to add, and where.

    Attributes:
        path: Keys from the top of the document to the list.
        entries: Entries to append; those that are there already are skipped.
        present: Whether an entry of the list (first argument) covers a new one (second argument).
        around: For a key of ``path`` that does not exist yet, what its new mapping contains besides the next key.
    """

    path: tuple[str, ...]
    entries: tuple[str, ...]
    present: Callable[[Any, str], bool]
    around: Mapping[str, Mapping[str, Any]] = {}

    def missing(self, existing: Sequence[Any]) -> list[str]:
        """Returns the entries that a list lacks."""
        absent: list[str] = []
        for entry in self.entries:
            if not any(self.present(key, entry) for key in (*existing, *absent)):
                absent.append(entry)
        return absent

    def nested(self, depth: int) -> Any:
        """Returns the value to create at ``path[:depth]`` where there is none yet."""
        if depth == len(self.path):
            return self.missing([])
        beside = self.around.get(self.path[depth - 1], {}) if depth else {}
        return {**beside, self.path[depth]: self.nested(depth + 1)}


def add(text: str, name: str, addition: Addition) -> str:
    """Returns the text with the entries added; the same text where they are all there.

    Args:
        text: One YAML document with a mapping at its top, or empty.
        name: The file's name in messages.
        addition: What to add.

    Raises:
        ConfigError: The text is not valid YAML, or the entries can't be added without changing something else.
    """
    data = parse_yaml(text, name).data
    expected = _with(data, addition)
    if expected == data:
        return text
    changed = _splice(text, addition)
    try:
        right = parse_yaml(changed, name).data == expected
    except ConfigError:
        right = False
    if not right:
        key = ".".join(addition.path)
        raise ConfigError(
            "cannot be edited without changing its neighbors (an alias, a merge key or an unusual layout). "
            f"Write it by hand: {key}: {to_flow(addition.entries)}",
            location=name,
            key=key,
        )
    return changed


def _with(data: Mapping[Any, Any], addition: Addition) -> Any:
    """Returns the data that the changed text must parse to."""
    # PyYAML parses an anchor and its aliases to one object; the change must affect one place only.
    changed = {key: copy.deepcopy(value) for key, value in data.items()}
    level: Any = changed
    for depth, key in enumerate(addition.path):
        if level.get(key) is None:
            level[key] = addition.nested(depth + 1)
            return changed
        if depth == len(addition.path) - 1:
            items = level[key] if isinstance(level[key], list) else [level[key]]
            if missing := addition.missing(items):
                level[key] = [*items, *missing]
        else:
            level[key] = copy.copy(level[key])
            if not isinstance(level[key], dict):
                # The short form, `pt2: openvino`.
                level[key] = {"backend": level[key]}
        level = level[key]
    return changed


def _splice(text: str, addition: Addition) -> str:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return with_line_end(text) + _block(addition.nested(0), 0, newline_of(text))
    for depth, key in enumerate(addition.path):
        if not isinstance(node, yaml.MappingNode):
            return _replace(text, node, addition, depth)
        child = next((value for name, value in node.value if name.value == key), None)
        if child is None:
            return _insert_key(text, node, key, addition.nested(depth + 1))
        node = child
    if isinstance(node, yaml.SequenceNode):
        items = [entry.value for entry in node.value]
        return _append(text, node, addition.missing(items))
    return _replace(text, node, addition, len(addition.path))


def _replace(text: str, node: yaml.Node, addition: Addition, depth: int) -> str:
    """Replaces a scalar or an empty value with a mapping or a list."""
    present = text[node.start_mark.index : node.end_mark.index]
    if node.tag == "tag:yaml.org,2002:null":
        new = to_flow(addition.nested(depth))
    elif depth == len(addition.path):
        new = ", ".join([f"[{present}", *map(to_flow, addition.missing([node.value]))]) + "]"
    else:
        new = f"{{backend: {present}, {to_flow(addition.nested(depth))[1:]}"
    space = "" if present or text[node.start_mark.index - 1 : node.start_mark.index].isspace() else " "
    return text[: node.start_mark.index] + space + new + text[node.end_mark.index :]


def _insert_key(text: str, node: yaml.MappingNode, key: str, value: Any) -> str:
    if node.flow_style:
        return into_flow(text, node, to_flow({key: value})[1:-1], node.value[-1][1] if node.value else None)
    block = _block({key: value}, node.start_mark.column, newline_of(text))
    return _after_line(text, _last_line(node), block)


def _append(text: str, node: yaml.SequenceNode, entries: list[str]) -> str:
    if node.flow_style:
        return into_flow(text, node, ", ".join(map(to_flow, entries)), node.value[-1] if node.value else None)
    newline = newline_of(text)
    lines = "".join(f"{' ' * node.start_mark.column}- {to_flow(entry)}{newline}" for entry in entries)
    return _after_line(text, _last_line(node), lines)


def into_flow(text: str, node: yaml.CollectionNode, new: str, last: yaml.Node | None) -> str:
    """Returns the text with entries inserted into a flow mapping or list, behind its last one if there is one."""
    if last is None:
        return text[: node.start_mark.index + 1] + new + text[node.end_mark.index - 1 :]
    return text[: last.end_mark.index] + ", " + new + text[last.end_mark.index :]


def _last_line(node: yaml.Node) -> int:
    """Returns the 0-based line on which the content of a node ends, without the comments after it."""
    if isinstance(node, yaml.ScalarNode):
        # A block scalar ends where the next line begins.
        return int(node.end_mark.line) - (node.style in {"|", ">"} and node.end_mark.column == 0)
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        return int(node.end_mark.line)
    if isinstance(node, yaml.SequenceNode):
        return max(_last_line(entry) for entry in node.value)
    # An alias has the position of its anchor, further up; then the line of the key is the last.
    return max(max(int(key.start_mark.line), _last_line(value)) for key, value in node.value)


def _after_line(text: str, line: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    return with_line_end("".join(lines[: line + 1])) + new + "".join(lines[line + 1 :])


def with_line_end(text: str) -> str:
    """Returns the text with a line end behind its last line."""
    return text if not text or text.endswith(("\n", "\r")) else text + newline_of(text)


def newline_of(text: str) -> str:
    """Returns the line end that a text uses."""
    return "\r\n" if "\r\n" in text else "\n"


def to_flow(value: Any) -> str:
    """Returns a value as YAML on one line."""
    # Dumped inside a list, because PyYAML ends a bare scalar with a document end marker.
    return str(yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=float("inf")).strip()[1:-1])


def _block(value: Mapping[str, Any], column: int, newline: str) -> str:
    text = ""
    for key, item in value.items():
        if isinstance(item, Mapping):
            text += f"{' ' * column}{key}:{newline}{_block(item, column + _INDENT, newline)}"
        else:
            text += f"{' ' * column}{key}: {to_flow(item)}{newline}"
    return text
