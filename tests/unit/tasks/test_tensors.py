"""Round trips of tensors in three formats, and bad requests."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.tasks.tensors import TensorRequest, parse, render

LIMIT = 1 << 20


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8, np.bool_, np.float16]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
    elements={"allow_nan": False, "allow_infinity": False},
)


@settings(max_examples=50, deadline=None)
@given(ARRAYS)
def test_npy_there_and_back(array: np.ndarray) -> None:
    request = parse(npy(array), LIMIT)
    answer = render({"output": request.positional[0]}, request, "m")
    got = np.load(io.BytesIO(answer))
    assert got.dtype == array.dtype and np.array_equal(got, array)


@settings(max_examples=50, deadline=None)
@given(ARRAYS)
def test_kserve_there_and_back(array: np.ndarray) -> None:
    names = {"float32": "FP32", "int64": "INT64", "uint8": "UINT8", "bool": "BOOL", "float16": "FP16"}
    entry = {
        "name": "x",
        "shape": list(array.shape),
        "datatype": names[str(array.dtype)],
        "data": array.ravel().tolist(),
    }
    request = parse({"inputs": [entry], "id": "7"}, LIMIT)
    answer = json.loads(json.dumps(render({"x": request.named["x"]}, request, "m")))
    assert answer == {"model_name": "m", "id": "7", "outputs": [entry]}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([[1, 2]], torch.int64),
        ([[1.0, 2]], torch.float32),
        ([True], torch.bool),
        ({"data": [1], "dtype": "int32"}, torch.int32),
    ],
)
def test_json_types(value, dtype) -> None:
    request = parse(value, LIMIT)
    assert request.positional[0].dtype is dtype
    assert parse(json.dumps(value).encode(), LIMIT).positional[0].dtype is dtype


def test_named_inputs_and_several_outputs() -> None:
    request = parse({"inputs": {"a": [1.0], "b": [[2]]}}, LIMIT)
    assert list(request.named) == ["a", "b"]
    outputs = {"y": torch.ones(1), "z": torch.zeros(2, dtype=torch.int64)}
    assert render(outputs, request, "m") == {"y": [1.0], "z": [0, 0]}
    archive = np.load(io.BytesIO(render(outputs, TensorRequest("npy"), "m")))
    assert sorted(archive.files) == ["y", "z"]


def test_bfloat16_answers() -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert np.load(io.BytesIO(render({"output": tensor}, TensorRequest("npy"), "m"))).tolist() == [1.5, -2.0]
    assert render({"output": tensor}, TensorRequest("kserve"), "m")["outputs"][0]["datatype"] == "BF16"


def test_kserve_numbers_become_their_datatype_at_once() -> None:
    entries = [("a", "FP64", [1e39, 0.1]), ("b", "INT64", [16777217.0]), ("c", "FP32", [0.1]), ("d", "FP16", [0.1])]
    body = {"inputs": [{"name": n, "shape": [len(d)], "datatype": t, "data": d} for n, t, d in entries]}
    named = parse(json.dumps(body).encode(), 10_000).named
    assert named["a"].dtype is torch.float64 and named["a"].tolist() == [1e39, 0.1]
    assert named["b"].tolist() == [16777217]
    assert named["c"].equal(torch.tensor([0.1])) and named["d"].equal(torch.tensor([0.1], dtype=torch.float16))


def kserve(**changes) -> dict:
    entry = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]} | changes
    return {"inputs": [{key: value for key, value in entry.items() if value is not None}]}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (b"hello", UnsupportedMediaTypeError, "neither .npy nor JSON"),
        (b"{not json", InvalidInputError, "not valid JSON"),
        (b"\x93NUMPY\x01\x00garbage", InvalidInputError, "npy"),
        (b"\x93NUMPY", InvalidInputError, "npy"),
        ([[1, 2], [3]], InvalidInputError, "rectangular"),
        ([["a"]], InvalidInputError, "numbers"),
        ({"x": 1}, InvalidInputError, '"data"'),
        ({"data": [1], "dtype": "float33"}, InvalidInputError, "float33"),
        (kserve(shape=[3]), InvalidInputError, "needs 3 values, but data has 2"),
        (kserve(shape=[2**32, 2**32], data=[]), InvalidInputError, "needs 18446744073709551616 values"),
        (kserve(shape=[True, 2]), InvalidInputError, "shape"),
        (kserve(data=[1.5, 2.0], datatype="INT64"), InvalidInputError, "a value that int64 cannot hold"),
        (kserve(data=[300, 2], datatype="UINT8"), InvalidInputError, "a value that uint8 cannot hold"),
        ({"inputs": kserve()["inputs"] * 2}, InvalidInputError, "is given twice"),
        ({"data": [1.5], "dtype": "int32"}, InvalidInputError, "a value that int32 cannot hold"),
        (kserve(datatype="FP99"), InvalidInputError, "FP99"),
        (kserve(data=None), InvalidInputError, "'data'"),
        (kserve(shape=["a"]), InvalidInputError, "shape"),
        (b"x" * (LIMIT + 1), PayloadTooLargeError, "max_bytes"),
    ],
)
def test_bad_requests_say_what_is_wrong(value, error, message) -> None:
    with pytest.raises(error, match=message):
        parse(value, LIMIT)


def test_pickles_are_not_read() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match="type object"):
        parse(buffer.getvalue(), LIMIT)


def test_an_npy_header_that_claims_more_than_it_brings_allocates_nothing() -> None:
    buffer = io.BytesIO()
    header = {"descr": "<i8", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    np.lib.format.write_array_header_1_0(buffer, header)
    with pytest.raises(InvalidInputError, match="declares .* 8796093022208 bytes, but only 8 follow"):
        parse(buffer.getvalue() + bytes(8), 1 << 20)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy_is_read(version) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(6.0).reshape(2, 3), version=version)
    assert parse(buffer.getvalue(), 1 << 20).positional[0].shape == (2, 3)


def test_numbers_keep_what_the_declared_type_can_hold() -> None:
    exact = 16777217.0
    assert float(parse([[exact, 0.5]], LIMIT).positional[0][0, 0]) != exact
    assert float(parse([[exact, 0.5]], LIMIT, torch.float64).positional[0][0, 0]) == exact
    assert parse([[1, 2]], LIMIT, torch.float64).positional[0].dtype is torch.int64


def test_kserve_outputs_are_those_that_are_asked_for() -> None:
    entry = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    tensors = {"a": torch.ones(1), "b": torch.zeros(1, dtype=torch.uint16)}
    answer = render(tensors, parse({"inputs": [entry], "outputs": [{"name": "b"}]}, LIMIT), "m")
    assert answer["outputs"] == [{"name": "b", "shape": [1], "datatype": "UINT16", "data": [0]}]
    with pytest.raises(InvalidInputError, match="no output 'c'; this model has a, b"):
        render(tensors, parse({"inputs": [entry], "outputs": [{"name": "c"}]}, LIMIT), "m")
    with pytest.raises(InvalidInputError, match="outputs must be a list of objects with a name"):
        parse({"inputs": [entry], "outputs": ["a"]}, LIMIT)
