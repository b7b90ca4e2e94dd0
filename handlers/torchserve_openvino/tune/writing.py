"""Writes what the tuner chose: the user's YAML with changed keys only, a JSON of all trials, and a page."""

from collections.abc import Mapping
from typing import Any

import yaml

from torchserve_openvino.config.yaml_source import parse_yaml
from torchserve_openvino.doctor.bisecting.splice import into_flow, newline_of, to_flow, with_line_end
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.tune.keys import KeyPath, with_changes

_INDENT = 2


def changed_yaml(text: str, name: str, changed: Mapping[KeyPath, Any], comments: Mapping[KeyPath, str]) -> str:
    """Returns a YAML text with some keys set, and everything else as it was: comments, order, quotes, line ends.

    Args:
        text: One YAML document with a mapping at its top.
        name: The file's name in messages.
        changed: Values by key path.
        comments: What is written above each changed key.

    Raises:
        ConfigError: A key can't be set without changing something else: an alias, a merge key, an unusual layout.
    """
    expected = with_changes(parse_yaml(text, name).data, changed)
    result = text
    for path, value in changed.items():
        result = _set(result, path, value, comments.get(path, ""))
    try:
        right = parse_yaml(result, name).data == expected
    except ConfigError:
        right = False
    if not right:
        lines = "; ".join(f"{'.'.join(path)}: {value}" for path, value in changed.items())
        raise ConfigError(f"cannot be edited without changing its neighbors. Set by hand: {lines}", location=name)
    return result


def _set(text: str, path: KeyPath, value: Any, comment: str) -> str:
    newline = newline_of(text)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return with_line_end(text) + _block(path, value, 0, comment, newline)
    for depth, key in enumerate(path):
        child = next((item for name, item in node.value if name.value == key), None)
        if child is None:
            return _insert(text, node, path[depth:], value, comment, newline)
        if depth == len(path) - 1:
            return _replace(text, child, value, comment, newline)
        if not isinstance(child, yaml.MappingNode):
            # An empty value, or a short form: `pt2: openvino`.
            raise ConfigError(
                f"is not a mapping, so {'.'.join(path)} can't be set in it.", key=".".join(path[: depth + 1])
            )
        node = child
    return text


def _replace(text: str, node: yaml.Node, value: Any, comment: str, newline: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    result = text[:start] + to_flow(value) + text[end:]
    return _comment_above(result, node.start_mark.line, comment, newline)


def _insert(text: str, node: yaml.MappingNode, path: KeyPath, value: Any, comment: str, newline: str) -> str:
    if node.flow_style:
        nested: Any = value
        for key in reversed(path):
            nested = {key: nested}
        last = node.value[-1][1] if node.value else None
        result = into_flow(text, node, to_flow(nested)[1:-1], last)
        return _comment_above(result, node.start_mark.line, comment, newline) if last is not None else result
    # In front of the first key: behind the last one, comments of the next section may follow.
    first = node.value[0][0].start_mark
    lines = text.splitlines(keepends=True)
    block = _block(path, value, first.column, comment, newline)
    return "".join(lines[: first.line]) + block + "".join(lines[first.line :])


def _block(path: KeyPath, value: Any, column: int, comment: str, newline: str) -> str:
    text = f"{' ' * column}# {comment}{newline}" if comment else ""
    for key in path[:-1]:
        text += f"{' ' * column}{key}:{newline}"
        column += _INDENT
    return f"{text}{' ' * column}{path[-1]}: {to_flow(value)}{newline}"


def _comment_above(text: str, line: int, comment: str, newline: str) -> str:
    if not comment:
        return text
    lines = text.splitlines(keepends=True)
    column = len(lines[line]) - len(lines[line].lstrip(" "))
    lines.insert(line, f"{' ' * column}# {comment}{newline}")
    return "".join(lines)
