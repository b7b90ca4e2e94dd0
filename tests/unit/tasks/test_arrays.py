"""Answers that are arrays: the JSON that TorchServe would make of their lists, but written faster."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from torchserve_openvino.tasks.arrays import Arrays

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=5)


@given(arrays.arrays(np.float32, SHAPES, elements=NUMBERS))
def test_numbers_are_those_of_the_tensor(values) -> None:
    tensor = torch.from_numpy(values)
    answer = Arrays({"rows": tensor, "turned": [tensor.mT if tensor.ndim > 1 else tensor]})
    assert json.loads(answer.written()) == answer.plain() == {
        "rows": tensor.tolist(),
        "turned": [(tensor.mT if tensor.ndim > 1 else tensor).tolist()],
    }  # fmt: skip


def test_text_is_what_torchserve_writes() -> None:
    pixels = torch.stack([torch.randint(150, (7, 5)).float(), torch.rand(7, 5) + 0.01], dim=2)
    assert Arrays(pixels).written() == json.dumps(pixels.tolist(), indent=2).encode()


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="JSON serializable: set"):
        Arrays({"a": {1}}).written()
