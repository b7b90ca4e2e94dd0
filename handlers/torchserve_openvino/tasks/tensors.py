"""Parses and renders tensors in the formats of requests: JSON, .npy and KServe v2."""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.serving.requests.json_body import MOST_DIMENSIONS, array_of, parse_json, shape_of
from torchserve_openvino.serving.requests.response_body import check_length

Format = Literal["json", "npy", "kserve"]
NPY_MAGIC = b"\x93NUMPY"

# https://kserve.github.io/website/ "Open Inference Protocol (V2)", tensor data types.
KSERVE_TYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
# Types that a request may name, of those that torch has arithmetic for.
JSON_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *KSERVE_TYPES.values(), torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
# The most inputs of one request; no model has as many arguments.
MOST_TENSORS = 256
_KEY = "handler.openvino.tensor.max_bytes"
# NumPy's kinds of bools, integers, floats and complex numbers.
_NPY_KINDS = frozenset("biufc")
_LARGEST = 2**63 - 1
# A digit, and what separates it from the next number.
_LEAST_BYTES = 2
KSERVE_NAMES = {dtype: name for name, dtype in KSERVE_TYPES.items()} | {
    torch.uint16: "UINT16", torch.uint32: "UINT32", torch.uint64: "UINT64",
}  # fmt: skip


@dataclass
class TensorRequest:
    """One request's inputs.

    Attributes:
        format: Format of the request and of its answer.
        positional: Inputs without a name, in order.
        named: Inputs by name.
        request_id: KServe's ``id``, repeated in the answer.
        outputs: Names of the outputs that KServe's ``outputs`` asks for; empty for all.
        guessed_types: Whether the request does not state its dtypes; JSON numbers are then int64 or floats.
    """

    format: Format
    positional: list[torch.Tensor] = field(default_factory=list)
    named: dict[str, torch.Tensor] = field(default_factory=dict)
    request_id: str | None = None
    outputs: tuple[str, ...] = ()
    guessed_types: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns all inputs, positional first."""
        return [*self.positional, *self.named.values()]


def parse(value: Any, max_bytes: int, floats: torch.dtype = torch.float32) -> TensorRequest:
    """Reads a request's body.

    Args:
        value: Bytes (.npy, or JSON text), or what TorchServe already parsed from JSON.
        max_bytes: Largest body, and largest tensor, in bytes.
        floats: dtype of JSON numbers with a fraction where the request states none.

    Raises:
        PayloadTooLargeError: More than ``max_bytes``.
        UnsupportedMediaTypeError: Neither .npy nor JSON.
        InvalidInputError: The content is not rectangular, not numeric, or does not match its own header.
    """
    if isinstance(value, (bytes, bytearray, str)):
        if len(value) > max_bytes:
            raise PayloadTooLargeError(
                f"the request has {len(value)} bytes, more than handler.openvino.tensor.max_bytes {max_bytes}"
            )
        raw = value.encode("utf-8", "replace") if isinstance(value, str) else bytes(value)
        if raw.startswith(NPY_MAGIC):
            request = TensorRequest("npy", positional=[_from_npy(raw)])
            return _checked(request, max_bytes)
        value = _from_json_text(raw)
    return _checked(_from_json(value, max_bytes, floats), max_bytes)


def _checked(request: TensorRequest, max_bytes: int) -> TensorRequest:
    tensors = request.tensors()
    size = sum([tensor.nbytes for tensor in tensors])
    if size > max_bytes:
        raise PayloadTooLargeError(
            f"the tensors have {size} bytes, more than handler.openvino.tensor.max_bytes {max_bytes}"
        )
    if not tensors:
        raise InvalidInputError("the request contains no tensor")
    return request


def _from_npy(raw: bytes) -> torch.Tensor:
    """Reads an array in NumPy's format without `numpy.load`, which allocates what the header states."""
    stream = io.BytesIO(raw)
    try:
        shape, in_columns, dtype = _npy_header(stream)
    except Exception as error:
        # NumPy evaluates the header's text, which raises whatever Python's parser raises.
        raise InvalidInputError(f"the .npy body cannot be read: {error}") from error
    if dtype.kind not in _NPY_KINDS:
        raise InvalidInputError(f"the .npy body has type {dtype}; numbers and bools are accepted")
    if not all(0 <= size <= _LARGEST for size in shape) or len(shape) > MOST_DIMENSIONS:
        raise InvalidInputError("the .npy body's header states no shape that an array can have")
    count, start = math.prod(shape), stream.tell()
    if count * dtype.itemsize > len(raw) - start:
        raise InvalidInputError(
            f"the .npy body's header declares {list(shape)} {dtype}, {count * dtype.itemsize} bytes, but only "
            f"{len(raw) - start} follow"
        )
    array = np.frombuffer(raw, dtype=dtype, count=count, offset=start)
    try:
        shaped = array.reshape(shape, order="F" if in_columns else "C")
        return torch.from_numpy(np.array(shaped, dtype=dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"the .npy body has type {dtype}, shape {list(shape)}: {error}") from error


def _npy_header(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version not in {(1, 0), (2, 0), (3, 0)}:
        raise ValueError(f"its version is {version}")
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    # 3.0 is 2.0 with names of fields in UTF-8, which arrays of numbers do not have.
    return np.lib.format.read_array_header_2_0(stream)


def _from_json_text(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except InvalidInputError as error:
        if raw.lstrip()[:1] in {b"{", b"["}:
            raise
        raise UnsupportedMediaTypeError(
            "the body is neither .npy nor JSON; send application/octet-stream with numpy.save, or application/json"
        ) from error


def _from_json(value: Any, max_bytes: int, floats: torch.dtype) -> TensorRequest:
    if not isinstance(value, Mapping):
        lists = _from_lists(value, None, "the body", max_bytes, floats)
        return TensorRequest("json", positional=[lists], guessed_types=True)
    inputs = value.get("inputs")
    if isinstance(inputs, (list, Mapping)) and len(inputs) > MOST_TENSORS and not _is_array(inputs):
        raise InvalidInputError(f"the request has {len(inputs)} inputs; the most is {MOST_TENSORS}")
    if isinstance(inputs, list) and inputs and all(isinstance(entry, Mapping) for entry in inputs):
        return _from_kserve(value, max_bytes)
    if isinstance(inputs, Mapping):
        dtype = value.get("dtype")
        named = {str(name): _from_lists(entry, dtype, str(name), max_bytes, floats) for name, entry in inputs.items()}
        return TensorRequest("json", named=named, guessed_types="dtype" not in value)
    for key in ("data", "instances", "inputs"):
        if key in value:
            tensor = _from_lists(value[key], value.get("dtype"), key, max_bytes, floats)
            return TensorRequest("json", positional=[tensor], guessed_types="dtype" not in value)
    raise InvalidInputError('the JSON object needs "data", "inputs" or "instances"; it has ' + _keys(value))


def _is_array(inputs: Any) -> bool:
    """Whether ``inputs`` is one tensor as nested lists, and not tensors of the KServe protocol or by name."""
    return isinstance(inputs, list) and not isinstance(inputs[0], Mapping)


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts JSON numbers to the dtype that the model takes; leaves them if that would change a value's kind.

    Integers become floats, and floats become integers if all are whole numbers; bools are never converted.
    """
    if tensor.dtype is dtype or torch.bool in {tensor.dtype, dtype} or dtype.is_complex:
        return tensor
    if dtype.is_floating_point:
        return tensor.to(dtype)
    return tensor if (whole := _held_by(tensor, dtype)) is None else whole


def _held_by(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Converts values to a dtype; None if it cannot hold all of them exactly."""
    converted = tensor.to(dtype)
    return converted if torch.equal(converted.to(tensor.dtype), tensor) else None


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in list(value)[:5]) or "no key"


def _from_lists(value: Any, dtype: Any, what: str, max_bytes: int, floats: torch.dtype) -> torch.Tensor:
    """Converts nested lists to a tensor; integers become int64, unless ``dtype`` names a torch type."""
    declared = None
    if dtype is not None:
        declared = JSON_TYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
        if declared is None:
            raise InvalidInputError(f"dtype {dtype!r} is not one of {listed(list(JSON_TYPES))}")
    tensor = _numbers(value, declared, what, max_bytes)
    default = floats if tensor.dtype is torch.float64 else tensor.dtype
    return _as(tensor, declared or default, what)


def _numbers(value: Any, declared: torch.dtype | None, what: str, max_bytes: int) -> torch.Tensor:
    """Returns nested lists as they are: int64, float64 or bool; `declared` is what they will become."""
    array = array_of(
        value,
        what,
        max_bytes=max_bytes,
        key=_KEY,
        item_bytes=torch.float64.itemsize if declared is None else declared.itemsize,
    )
    return torch.from_numpy(array)


def _as(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Converts values to the dtype that a request names.

    Raises:
        InvalidInputError: An integer dtype cannot hold one of them.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return tensor.to(dtype)
    converted = _held_by(tensor, dtype)
    if converted is None:
        raise InvalidInputError(f"{what} has a value that {str(dtype).removeprefix('torch.')} cannot hold")
    return converted


def _from_kserve(value: Mapping[str, Any], max_bytes: int) -> TensorRequest:
    name = value.get("id")
    if not isinstance(name, (str, int, type(None))):
        raise InvalidInputError(f"id must be a text, not {type(name).__name__}")
    outputs = value.get("outputs") or []
    if not isinstance(outputs, list) or not all(
        isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in outputs
    ):
        raise InvalidInputError("outputs must be a list of objects with a name each")
    names = tuple(str(entry["name"]) for entry in outputs)
    request = TensorRequest("kserve", request_id=None if name is None else str(name), outputs=names)
    for position, entry in enumerate(value["inputs"]):
        name = entry.get("name", f"input_{position}")
        if not isinstance(name, str):
            raise InvalidInputError(f"input {position}: name must be a text, not {type(name).__name__}")
        missing = [key for key in ("shape", "datatype", "data") if key not in entry]
        if missing:
            raise InvalidInputError(f"input {name!r} has no {missing[0]!r}")
        if name in request.named:
            raise InvalidInputError(f"input {name!r} is given twice")
        kind = entry["datatype"]
        dtype = KSERVE_TYPES.get(kind.upper()) if isinstance(kind, str) else None
        if dtype is None:
            raise InvalidInputError(f"input {name!r} has datatype {kind!r}; valid types: {', '.join(KSERVE_TYPES)}")
        request.named[name] = _kserve_tensor(entry, dtype, f"input {name!r}", max_bytes)
    return request


def _kserve_tensor(entry: Mapping[str, Any], dtype: torch.dtype, what: str, max_bytes: int) -> torch.Tensor:
    data = _numbers(entry["data"], dtype, what, max_bytes)
    return _as(data.reshape(shape_of(entry["shape"], data.numel(), what)), dtype, what)


def render(
    outputs: Mapping[str, torch.Tensor], request: TensorRequest, model_name: str, most_bytes: int | None = None
) -> Any:
    """Renders outputs in the format of the request.

    Args:
        outputs: Tensors by name; a single one is called ``output``.
        request: The request.
        model_name: The model's name.
        most_bytes: The longest body that the host sends; None if it has no limit.

    Returns:
        Nested lists or a dict of them (JSON), bytes (.npy, or .npz of several), or a KServe v2 answer.

    Raises:
        PayloadTooLargeError: They are certainly longer than ``most_bytes``.
        InvalidInputError: They are complex, which JSON has no numbers for, or lack one that the request asks for.
    """
    if unknown := [name for name in request.outputs if name not in outputs]:
        raise InvalidInputError(f"there is no output {unknown[0]!r:.100}; this model has {', '.join(outputs)}")
    outputs = {name: outputs[name] for name in request.outputs} or outputs
    if request.format == "npy":
        check_length(sum(tensor.nbytes for tensor in outputs.values()), most_bytes)
        return _to_npy(outputs)
    check_length(_LEAST_BYTES * sum([tensor.numel() for tensor in outputs.values()]), most_bytes)
    if name := next((name for name, tensor in outputs.items() if tensor.is_complex()), None):
        raise InvalidInputError(f"{name} is complex, which JSON has no numbers for: send the request as .npy")
    if request.format == "kserve":
        answer: dict[str, Any] = {"model_name": model_name, "outputs": [_to_kserve(*pair) for pair in outputs.items()]}
        return answer if request.request_id is None else {**answer, "id": request.request_id}
    lists = {name: tensor.tolist() for name, tensor in outputs.items()}
    return lists["output"] if list(lists) == ["output"] else lists


def _to_npy(outputs: Mapping[str, torch.Tensor]) -> bytes:
    arrays = {name: _numpy(tensor) for name, tensor in outputs.items()}
    buffer = io.BytesIO()
    if len(arrays) == 1:
        np.save(buffer, next(iter(arrays.values())), allow_pickle=False)
    else:
        np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    # NumPy has no bfloat16; float32 represents all of its values exactly.
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _to_kserve(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "datatype": KSERVE_NAMES.get(tensor.dtype, "FP32"),
        "data": tensor.reshape(-1).tolist(),
    }
