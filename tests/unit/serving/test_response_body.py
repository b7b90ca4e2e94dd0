"""Answers are made so that the host can send them: valid, and no longer than its frontend takes."""

import json

import pytest
import torch

from torchserve_openvino.errors import ModelCallError, PayloadTooLargeError
from torchserve_openvino.serving.requests.response_body import sendable
from torchserve_openvino.serving.torchserve.context import Context
from torchserve_openvino.serving.torchserve.frontend_limits import DEFAULT, most_response_bytes, stated_limit


def test_numbers_that_json_does_not_have_become_null() -> None:
    body = {"scores": [1.0, float("nan"), [float("inf"), -float("inf")]], "label": "NaN", float("nan"): 1}
    sent = sendable(body, None)
    assert sent == {"scores": [1.0, None, [None, None]], "label": "NaN", None: 1}
    json.dumps(sent, allow_nan=False)


@pytest.mark.parametrize("body", [{"a": 1}, [1.5, "ü"], "text", b"bytes", 3, None])
def test_valid_bodies_are_left_as_they_are(body) -> None:
    assert sendable(body, 100) is body or sendable(body, 100) == body


@pytest.mark.parametrize(
    "body", [{"a": torch.zeros(1)}, [object()], {(1, 2): 3}, [10**5000]], ids=["tensor", "object", "key", "digits"]
)
def test_what_is_no_json_is_refused(body) -> None:
    with pytest.raises(ModelCallError, match="cannot be sent as JSON"):
        sendable(body, None)


@pytest.mark.parametrize(
    "body", [b"a" * 101, "a" * 101, "ü" * 51, torch.zeros(26), ["a" * 100], [[1] * 10] * 3], ids=range(6)
)  # fmt: skip
def test_long_bodies_are_refused_in_the_hosts_own_format(body) -> None:
    with pytest.raises(PayloadTooLargeError, match="max_response_size is 100"):
        sendable(body, 100)
    sendable(body, 400)


def test_half_of_a_surrogate_pair_does_not_end_the_worker() -> None:
    assert sendable("a\ud800", None).encode() == b"a?"


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("max_response_size=123\n", {}, 123),
        ("# max_response_size=1\nmax_response_size = 77\r\nother=1\n", {}, 77),
        ("max_response_size: 9\nmax_response_size=10\n", {}, 10),
        ("max_response_size=ten\n", {}, DEFAULT),
        ("", {"TS_MAX_RESPONSE_SIZE": "5"}, DEFAULT),
        ("enable_envvars_config=true\nmax_response_size=4\n", {"TS_MAX_RESPONSE_SIZE": "5"}, 5),
        ("enable_envvars_config=true\nmax_response_size=4\n", {}, 4),
    ],
)
def test_the_frontends_limit_is_read_where_the_frontend_reads_it(tmp_path, text, environment, expected) -> None:
    (tmp_path / "own.properties").write_text(text)
    command = ["java", "-cp", "x", "org.pytorch.serve.ModelServer", "--python", "p", "-f", "own.properties", "-s", "."]
    assert stated_limit(command, tmp_path, environment) == expected
    assert stated_limit(["java"], tmp_path, environment) == DEFAULT


def test_without_a_frontend_its_default_counts_and_other_hosts_have_no_limit() -> None:
    assert most_response_bytes(object()) == DEFAULT
    assert most_response_bytes(Context({}, ".", {}, 1, None)) is None
