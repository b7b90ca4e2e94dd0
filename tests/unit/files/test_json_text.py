"""JSON that someone else wrote: one error for whatever is wrong with it."""

import json
import math
from pathlib import Path

import pytest

from torchserve_openvino.files.json_text import JsonError, parse_json, read_json, read_json_object

WRONG = {
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "deep objects": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "digits": ("9" * 5000, "too many digits"),
    "NaN": ("[NaN]", "holds NaN"),
    "half": ('{"a": 1', "at line 1, column"),
    "empty": ("", "at line 1, column 1"),
    "bytes": (b"\xff\xfe\xfd", "not UTF-8"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_one_error(tmp_path: Path, kind: str) -> None:
    text, message = WRONG[kind]
    with pytest.raises(JsonError, match=message):
        parse_json(text)
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JsonError, match=rf"file\.json is not valid JSON: .*{message}"):
        read_json(path)


def test_what_pythons_own_writer_makes_is_read() -> None:
    value = {"limits": [0.0, math.inf, -math.inf], "size": 10**31, "name": "é\ud800"}
    assert parse_json(json.dumps(value)) == value
    assert math.isnan(parse_json("NaN", allow_nan=True))


def test_an_object_is_one(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(JsonError, match="must hold a JSON object, not a value of type list"):
        read_json_object(tmp_path / "list.json")


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchserve_openvino.files.json_text.MAX_BYTES", 10)
    (tmp_path / "large.json").write_text("[1, 2, 3, 4, 5]")
    with pytest.raises(JsonError, match="more than 10"):
        read_json(tmp_path / "large.json")
