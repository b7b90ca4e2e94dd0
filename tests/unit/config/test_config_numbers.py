"""Every number of `handler.openvino` refuses what only looks like one; pydantic would take ``true`` for 1."""

from collections.abc import Iterator
from typing import Any

import pytest

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.config.reference import json_schema
from torchserve_openvino.errors import ConfigError

_SCHEMA = json_schema()


def _alternatives(place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a value may have, without references."""
    if "$ref" in place:
        yield from _alternatives(_SCHEMA["$defs"][place["$ref"].rpartition("/")[2]])
    elif "anyOf" in place:
        for each in place["anyOf"]:
            yield from _alternatives(each)
    else:
        yield place


def _numbers(place: dict[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Paths of the fields that are numbers, and whether they must be whole."""
    for one in _alternatives(place):
        for name, field in one.get("properties", {}).items():
            types = {str(each.get("type")) for each in _alternatives(field)}
            if types & {"integer", "number"} and "boolean" not in types:
                yield (*path, name), "number" not in types
            yield from _numbers(field, *path, name)


NUMBERS = sorted({each for each in _numbers(_SCHEMA) if each[0][:2] == ("handler", "openvino")})


def test_there_are_some() -> None:
    assert len(NUMBERS) > 30 and {whole for _, whole in NUMBERS} == {True, False}


@pytest.mark.parametrize(("path", "whole"), NUMBERS, ids=[".".join(path) for path, _ in NUMBERS])
def test_what_only_looks_like_a_number_is_refused(path: tuple[str, ...], whole: bool) -> None:
    # YAML 1.1 reads 1e-3 as a string.
    odd = (True, False, float("nan"), float("inf"), -(10**400))
    for value in (*odd, "1") if whole else (*odd, 10**400, "one", "nan"):
        given: Any = value
        for name in reversed(path):
            given = {name: given}
        with pytest.raises(ConfigError, match=path[-1]):
            load_serving_config(given)
