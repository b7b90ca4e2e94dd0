"""Nested lists of JSON become arrays only within bounds that are computed first."""

import math
from typing import Any

import numpy as np
import pytest

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError
from torchserve_openvino.serving.requests.json_body import (
    NotRectangularError,
    array_of,
    flatten,
    nested,
    shape_of,
)


def array(value: Any, max_bytes: int = 1000) -> np.ndarray:
    return array_of(value, "data", max_bytes=max_bytes, key="tensor.max_bytes")


@pytest.mark.parametrize(
    "value",
    [1, 2.5, True, [], [[], []], [1, 2], [[1, 2.5], [True, 3]], [[True, False]], [2**63], [[[1]], [[2]]]],
    ids=str,
)
def test_numbers_become_what_numpy_makes_of_them(value) -> None:
    made = array(value)
    expected = np.array(value)
    assert made.dtype == expected.dtype and made.shape == expected.shape and (made == expected).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2], [3]], "not rectangular"),
        ([1, [2]], "not rectangular"),
        ([[1], 2], "not rectangular"),
        (["a", "b" * 100], "not text"),
        ([None], "not null"),
        ([{"a": 1}], "not objects"),
        ({"a": 1}, "not objects"),
        ([10**400, 1.5], "64 bits"),
        ([10**400], "64 bits"),
        ([2**63, -1], "64 bits"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_anything_else_is_refused(value, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        array(value)


def test_the_bytes_of_the_array_are_bounded_before_it_is_made() -> None:
    assert array([[1.0] * 5] * 25).nbytes == 1000
    with pytest.raises(PayloadTooLargeError, match="has 126 numbers, 1008 bytes, more than tensor.max_bytes 1000"):
        array([[1] * 6] * 21)
    with pytest.raises(PayloadTooLargeError, match="1600 bytes"):
        array_of([1] * 100, "data", max_bytes=1000, key="k", item_bytes=16)


def test_lists_are_as_deep_as_arrays_can_be() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    assert array(value).ndim == 64
    with pytest.raises(InvalidInputError, match="deeper than 64 levels"):
        array([value])


@pytest.mark.parametrize("shape", [[], [1], [6], [2, 3], [1, 2, 3]])
def test_nested_is_the_reverse_of_flatten(shape) -> None:
    values = list(range(math.prod(shape)))
    expected = np.arange(len(values)).reshape(shape).tolist()
    assert nested(values, shape) == expected and flatten(expected) == (shape, values)


@pytest.mark.parametrize("shape", [[0], [0, 3], [2, 0], [2**62, 0]])
def test_a_shape_of_no_values_makes_no_lists(shape) -> None:
    assert nested([], shape) == []


@pytest.mark.parametrize(
    "shape",
    [[0, 10**24], [10**400], [2**62] * 64, [1] * 65, [-1, 4], [4.0], [True], "4", None, 4, [[4]], [3], [1] * 100_000],
    ids=range(13),
)
def test_shapes_that_no_array_has_are_refused(shape) -> None:
    with pytest.raises(InvalidInputError, match="shape") as refused:
        shape_of(shape, 4, "input 'x'")
    assert len(str(refused.value)) < 3000


def test_one_dimension_may_be_left_open_where_the_protocol_leaves_it_open() -> None:
    assert shape_of([-1, 2], 4, "x", infers=True) == [2, 2]
    for wrong in ([-1, 3], [-1, -1], [-1, 0], [-2]):
        with pytest.raises(InvalidInputError):
            shape_of(wrong, 4, "x", infers=True)


def test_ragged_lists_have_no_shape() -> None:
    with pytest.raises(NotRectangularError, match="1 to 2 values"):
        flatten([[1, 2], [3]])


@pytest.mark.parametrize("shape", [[2, 3, 4], [24, 1, 1], [1, 24], [1] * 60 + [24], [4, 6, 1, 1], []])
def test_values_become_lists_of_a_shape(shape: list[int]) -> None:
    values = list(range(math.prod(shape)))
    assert np.array_equal(np.array(nested(values, shape)), np.arange(len(values)).reshape(shape))


def test_a_shape_of_many_more_lists_than_values_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="1000 values of shape .* are 60000 lists; the most is"):
        nested([0] * 1000, [1000] + [1] * 60)
