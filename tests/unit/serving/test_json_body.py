"""JSON of requests: parsed or measured, always within limits."""

import json
from typing import Any

import pytest

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError
from torchserve_openvino.serving.requests.json_body import check_json, parse_json


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"9" * 5000, "thousands of digits"),
        (b'{"inputs": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b'{"a": 1', "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
    ],
    ids=["lists", "objects", "digits", "digits inside", "cut", "UTF-16", "surrogate"],
)
def test_what_can_not_be_parsed_is_the_senders_fault(body, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_json(body)


def test_a_mark_of_the_byte_order_is_no_fault() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize(
    "value",
    [
        1, -5, 12345678901234567890, True, None, 1.5, "", "text", [], {}, [1, 2, 3], ["a", ["b", []]], {"": [{}]},
        {"inputs": ["one", "two"], "parameters": {"top_k": 3, "deep": [[[1]]]}}, [[1] * 10] * 10, [255, 128, 7, 8, 15],
    ],
    ids=str,
)  # fmt: skip
def test_parsed_json_counts_as_its_shortest_text_at_most(value) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    check_json(value, max_bytes=len(text.encode()), key="text.max_bytes")


@pytest.mark.parametrize("value", ["a" * 200, ["a"] * 60, {"a" * 60: "a" * 60}, [[]] * 70, 10**500, [[1, 2] * 30]])
def test_parsed_json_that_was_longer_is_refused(value) -> None:
    with pytest.raises(PayloadTooLargeError, match="more than text.max_bytes 100 bytes"):
        check_json(value, max_bytes=100, key="text.max_bytes")


def test_parsed_json_is_as_deep_as_arrays_can_be() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    check_json(value, max_bytes=1000, key="k")
    with pytest.raises(InvalidInputError, match="64 levels"):
        check_json([value], max_bytes=1000, key="k")
