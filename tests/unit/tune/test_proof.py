"""Which answers count as right."""

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from torchserve_openvino.tune.proof import ModelAnswer, difference


def answer(value: Any, status: int = 200) -> ModelAnswer:
    return ModelAnswer(status, "application/json", json.dumps(value).encode())


def array(values: np.ndarray) -> ModelAnswer:
    file = io.BytesIO()
    np.save(file, values)
    return ModelAnswer(200, "application/octet-stream", file.getvalue())


RIGHT = [
    ({"cat": 0.7, "dog": 0.2}, {"cat": 0.7005, "dog": 0.1996}, "f32"),
    # The last labels of a ranking change places within the tolerance.
    ({"cat": 0.7, "dog": 0.101, "fox": 0.100}, {"cat": 0.69, "dog": 0.11, "owl": 0.11}, "bf16"),
    # A lead within the tolerance is no lead.
    ({"cat": 0.41, "dog": 0.40}, {"dog": 0.405, "cat": 0.403}, "bf16"),
    ([[0.1, -3.0], [200.0, 0.5]], [[0.15, -3.0], [200.1, 0.5]], "f32"),
    ({"tokens": [1, 2], "text": "a", "score": 0.5}, {"tokens": [1, 2], "text": "a", "score": 0.51}, "bf16"),
    # Rounding of zero.
    ([1e-9, -2e-9, 0.0], [3e-9, 1e-9, 0.0], "f32"),
    ([], [], "f32"),
    (None, None, "f32"),
    ([0.5, float("inf"), float("nan")], [0.5, float("inf"), float("nan")], "f32"),
    # A box is a few pixels wider in a lower precision.
    ({"xmin": 10, "ymin": 20, "xmax": 300, "ymax": 400}, {"xmin": 11, "ymin": 20, "xmax": 302, "ymax": 400}, "bf16"),
    # OpenAI's answers have a name and a time of their own.
    (
        {"id": "a", "created": 1, "choices": [{"text": "x"}]},
        {"id": "b", "created": 9, "choices": [{"text": "x"}]},
        "f32",
    ),
]
WRONG = [
    # A number that names something has no tolerance, and is no scale for the score beside it.
    ([{"index": 40, "score": 0.9}], [{"index": 41, "score": 0.9}], "bf16", "41"),
    ([{"index": 40, "score": 0.9}], [{"index": 40, "score": 0.5}], "bf16", "differs by 0.4"),
    ([{"index": 2003, "value": 1.2}], [{"index": 2003, "value": 1.3}], "f32", "differs by 0.1"),
    ({"cat": 0.7, "dog": 0.2}, {"dog": 0.7, "cat": 0.2}, "bf16", "names 'dog' first"),
    ({"cat": 0.7, "dog": 0.2}, {"cat": 0.75, "dog": 0.2}, "bf16", r"answer\.cat differs by 0.05"),
    ({"cat": 0.7, "dog": 0.2}, {"cat": 0.7, "fox": 0.2, "owl": 0.1}, "f32", "differs"),
    ([0.5, 0.5], [0.5, 0.52], "f32", "differs by 0.02"),
    # Vectors of length 1 have small numbers: the largest of them is the scale.
    ([0.036, -0.036, 0.01], [0.036, -0.036, 0.02], "bf16", "differs by 0.01"),
    ([1e-2, 2e-2], [0.0, 0.0], "f32", "differs by 0.02"),
    ([0.5, 0.5], [0.5], "f32", "shape"),
    ([0.5, 0.5], [0.5, float("nan")], "f32", "NaN"),
    # Tokens and pixels are equal or wrong.
    ({"tokens": [1, 2]}, {"tokens": [1, 3]}, "bf16", "'3' instead of '2'"),
    ([1000, 5], [1001, 5], "f32", r"answer\[0\] is '1001' instead of '1000'"),
    ({"class_id": 281}, {"class_id": 285}, "bf16", "'285' instead of '281'"),
    ({"class_id": 281, "score": 0.9, "label": "cat"}, {"class_id": 285, "score": 0.9, "label": "cat"}, "bf16", "'285'"),
    (281, 285, "bf16", "'285'"),
    ([0.5, float("inf")], [0.5, float("-inf")], "f32", "infinity"),
    ([0.5, float("inf")], [0.5, float("nan")], "f32", "infinity"),
    ([0.5, 1.0], [0.5, float("inf")], "f32", "infinity"),
    ({"text": "a"}, {"text": "b"}, "bf16", "'b' instead of 'a'"),
    ({"text": "a"}, {"words": "a"}, "f32", "keys"),
    ([{"a": "x"}], [], "f32", "0 entries instead of 1"),
]


@pytest.mark.parametrize(("before", "after", "precision"), RIGHT)
def test_what_is_right(before: Any, after: Any, precision: str) -> None:
    assert difference(answer(before), answer(after), precision) is None


@pytest.mark.parametrize(("before", "after", "precision", "reason"), WRONG)
def test_what_is_wrong(before: Any, after: Any, precision: str, reason: str) -> None:
    found = difference(answer(before), answer(after), precision)
    assert found is not None
    assert re.search(reason, found), found


def test_failures_answered_fast_are_wrong() -> None:
    found = difference(answer([0.5]), ModelAnswer(503, "text/plain", b"busy"), "f32")
    assert found == "status 503 instead of 200: busy"


def test_arrays_and_bytes() -> None:
    values = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    assert difference(array(values), array(values + 1e-5), "f32") is None
    assert "differs" in str(difference(array(values), array(values + 0.1), "bf16"))
    assert "shape" in str(difference(array(values), array(values.T), "f32"))
    assert "instead of" in str(
        difference(ModelAnswer(200, "x/y", b"\xff\x00"), ModelAnswer(200, "x/y", b"\xff\x01"), "f32")
    )


def stream(*pieces: str) -> ModelAnswer:
    events = [json.dumps({"id": "a", "choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    return ModelAnswer(
        200, "text/event-stream", "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()
    )


def test_streams_are_compared_by_their_text() -> None:
    assert difference(stream("Once ", "upon"), stream("Once", " up", "on"), "f32") is None
    assert difference(stream("Once ", "upon"), stream("Once ", "again"), "f32")


def picture(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


DEPTH = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 15
CLASSES = np.zeros((64, 64), np.uint8)
PHOTO = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        # Rounded otherwise.
        (DEPTH, DEPTH + 1, True), (DEPTH, DEPTH + 200, False), (PHOTO // 2, PHOTO // 2 + 1, True),
        (PHOTO // 2, PHOTO // 2 + 9, False), (PHOTO, PHOTO[:32], False),
        # Other classes are no neighbors.
        (CLASSES, CLASSES + np.eye(64, dtype=np.uint8) * (np.arange(64) < 3), True), (CLASSES, CLASSES + 1, False),
    ],
)  # fmt: skip
def test_pictures_are_compared_by_their_pixels(before: np.ndarray, after: np.ndarray, same: bool) -> None:
    bodies = [picture(each) for each in (before, after)]
    raw = [ModelAnswer(200, "image/png", body) for body in bodies]
    inside = [answer({"shown": base64.b64encode(body).decode(), "score": 0.5}) for body in bodies]
    for one, other in (raw, inside):
        assert difference(one, one, "f32") is None
        assert (difference(one, other, "f32") is None) == same


def test_vectors_in_base64_are_compared_as_numbers() -> None:
    vector = np.linspace(-1, 1, 32, dtype=np.float32)

    def embedded(values: np.ndarray) -> ModelAnswer:
        return answer({"data": [{"index": 0, "embedding": base64.b64encode(values.tobytes()).decode()}]})

    assert difference(embedded(vector), embedded(vector + 5e-4), "f32") is None
    assert "differs" in str(difference(embedded(vector), embedded(vector + 5e-3), "f32"))


def test_an_answer_without_labels_is_another_one() -> None:
    assert "keys" in str(difference(answer({"cat": 0.9}), answer({}), "f32"))
    labels = np.full((1, 8, 8), 3, np.uint8)
    assert "differs" in str(difference(array(labels), array(labels + 1), "f32"))
