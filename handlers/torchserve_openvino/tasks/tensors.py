"""Parses and renders tensors in the formats of requests: JSON, .npy and KServe v2."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError

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
KSERVE_NAMES = {dtype: name for name, dtype in KSERVE_TYPES.items()}


@dataclass
class TensorRequest:
    """One request's inputs.

    Attributes:
        format: Format of the request and of its answer.
        positional: Inputs without a name, in order.
        named: Inputs by name.
        request_id: KServe's ``id``, repeated in the answer.
        guessed_types: Whether the request does not state its dtypes; JSON numbers are then int64 or float32.
    """

    format: Format
    positional: list[torch.Tensor] = field(default_factory=list)
    named: dict[str, torch.Tensor] = field(default_factory=dict)
    request_id: str | None = None
    guessed_types: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns all inputs, positional first."""
        return [*self.positional, *self.named.values()]


def parse(value: Any, max_bytes: int) -> TensorRequest:
    """Reads a request's body.

    Args:
        value: Bytes (.npy, or JSON text), or what TorchServe already parsed from JSON.
        max_bytes: Largest body, and largest tensor, in bytes.

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
        raw = value.encode() if isinstance(value, str) else bytes(value)
        if raw.startswith(NPY_MAGIC):
            request = TensorRequest("npy", positional=[_from_npy(raw)])
            return _checked(request, max_bytes)
        value = _from_json_text(raw)
    return _checked(_from_json(value), max_bytes)


def _checked(request: TensorRequest, max_bytes: int) -> TensorRequest:
    size = sum(tensor.nbytes for tensor in request.tensors())
    if size > max_bytes:
        raise PayloadTooLargeError(
            f"the tensors have {size} bytes, more than handler.openvino.tensor.max_bytes {max_bytes}"
        )
    if not request.tensors():
        raise InvalidInputError("the request contains no tensor")
    return request


def _from_npy(raw: bytes) -> torch.Tensor:
    try:
        _check_claimed_size(raw)
        array = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InvalidInputError(f"the .npy body cannot be read: {error}") from error
    return _tensor_of(array, "the .npy body")


def _check_claimed_size(raw: bytes) -> None:
    """Checks that the data is as large as the header claims, since numpy.load allocates the claimed size first.

    Raises:
        ValueError: The header cannot be read, or claims more than there is.
    """
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    claimed, came = math.prod(shape) * dtype.itemsize, len(raw) - stream.tell()
    if not dtype.hasobject and claimed > came:
        raise ValueError(f"its header declares {list(shape)} {dtype}, {claimed} bytes, but only {came} follow")


def _tensor_of(array: np.ndarray, what: str) -> torch.Tensor:
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(native.reshape(array.shape).copy())
    except TypeError as error:
        raise InvalidInputError(f"{what} has type {array.dtype}, which torch does not have") from error


def _from_json_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise InvalidInputError(
            "the body is JSON that is nested too deep; tensors have at most 64 dimensions"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        if raw.lstrip()[:1] in {b"{", b"["}:
            raise InvalidInputError(f"the body is not valid JSON: {error}") from error
        raise UnsupportedMediaTypeError(
            "the body is neither .npy nor JSON; send application/octet-stream with numpy.save, or application/json"
        ) from error


def _from_json(value: Any) -> TensorRequest:
    if isinstance(value, Mapping):
        inputs = value.get("inputs")
        if isinstance(inputs, list) and inputs and all(isinstance(entry, Mapping) for entry in inputs):
            return _from_kserve(value)
        if isinstance(inputs, Mapping):
            named = {str(name): _from_lists(entry, value.get("dtype"), str(name)) for name, entry in inputs.items()}
            return TensorRequest("json", named=named, guessed_types="dtype" not in value)
        for key in ("data", "instances", "inputs"):
            if key in value:
                tensor = _from_lists(value[key], value.get("dtype"), key)
                return TensorRequest("json", positional=[tensor], guessed_types="dtype" not in value)
        raise InvalidInputError('the JSON object needs "data", "inputs" or "instances"; it has ' + _keys(value))
    return TensorRequest("json", positional=[_from_lists(value, None, "the body")], guessed_types=True)


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
    found = tensor.to(dtype)
    return found if torch.equal(found.to(tensor.dtype), tensor) else None


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in list(value)[:5]) or "no key"


def _from_lists(value: Any, dtype: Any, what: str) -> torch.Tensor:
    """Converts nested lists to a tensor; integers become int64, floats float32, unless ``dtype`` names a torch type."""
    wanted = None
    if dtype is not None:
        wanted = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(wanted, torch.dtype):
            raise InvalidInputError(f"dtype {dtype!r} is not a torch dtype; use float32 or int64, for instance")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInputError(f"{what} is not rectangular: {error}") from error
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(f"{what} must be nested lists of numbers of equal length, not {_describe(value)}")
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    default = torch.float32 if tensor.dtype is torch.float64 else tensor.dtype
    return _as(tensor, wanted or default, what)


def _as(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Converts values to the dtype that a request names.

    Raises:
        InvalidInputError: An integer dtype cannot hold one of them.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return tensor.to(dtype)
    found = _held_by(tensor, dtype)
    if found is None:
        raise InvalidInputError(f"{what} has a value that {str(dtype).removeprefix('torch.')} cannot hold")
    return found


def _describe(value: Any) -> str:
    return f"a list with {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


def _from_kserve(value: Mapping[str, Any]) -> TensorRequest:
    request = TensorRequest("kserve", request_id=value.get("id"))
    for position, entry in enumerate(value["inputs"]):
        name = str(entry.get("name", f"input_{position}"))
        missing = [key for key in ("shape", "datatype", "data") if key not in entry]
        if missing:
            raise InvalidInputError(f"input {name!r} has no {missing[0]!r}")
        dtype = KSERVE_TYPES.get(str(entry["datatype"]).upper())
        if name in request.named:
            raise InvalidInputError(f"input {name!r} is given twice")
        if dtype is None:
            raise InvalidInputError(
                f"input {name!r} has datatype {entry['datatype']!r}; valid types: {', '.join(KSERVE_TYPES)}"
            )
        request.named[name] = _kserve_tensor(entry, dtype, name)
    return request


def _kserve_tensor(entry: Mapping[str, Any], dtype: torch.dtype, name: str) -> torch.Tensor:
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidInputError(f"input {name!r}: shape must be a list of integers, not {shape!r}")
    data = _from_lists(entry["data"], None, f"input {name!r}")
    count = math.prod(shape)
    if data.numel() != count:
        raise InvalidInputError(f"input {name!r}: shape {shape} needs {count} values, but data has {data.numel()}")
    return _as(data.reshape(shape), dtype, f"input {name!r}")


def render(outputs: Mapping[str, torch.Tensor], request: TensorRequest, model_name: str) -> Any:
    """Renders outputs in the format of the request.

    Args:
        outputs: Tensors by name; a single one is called ``output``.

    Returns:
        Nested lists or a dict of them (JSON), bytes (.npy, or .npz of several), or a KServe v2 answer.
    """
    if request.format == "npy":
        return _to_npy(outputs)
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
