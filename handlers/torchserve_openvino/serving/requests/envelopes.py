"""Request envelopes: the protocols in which TorchServe and others wrap the items of a request.

They are read and written as TorchServe's `service_envelope` does, with several items in one request.
"""

import base64
import binascii
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.requests.json_body import NotRectangularError, flatten, nested, parse_json, shape_of
from torchserve_openvino.serving.requests.messages import EnvelopeKind, Request
from torchserve_openvino.serving.requests.response_body import finite

_BYTES = "BYTES"
# The protocol's names of NumPy's kinds of numbers.
_NUMBERS = {"f": "FP", "i": "INT", "u": "UINT", "b": "BOOL"}
MULTI_STATUS = 207


@dataclass(frozen=True)
class Content:
    """The items of one request, and the names and id that its answer repeats."""

    items: list[Any]
    names: tuple[str, ...] = ()
    request_id: str = ""


class Envelope:
    """One kind of envelope.

    Args:
        kind: TorchServe's name for it.
        model: The model's name, for answers.
        version: Its version.
    """

    def __init__(self, kind: EnvelopeKind, model: str | None = None, version: str | None = None) -> None:
        self.kind = kind
        self._model, self._version = model, version

    def open(self, row: Any) -> Content:
        """Returns a request's items, in the form in which upstream's envelope passes them to a handler.

        Raises:
            InvalidInputError: The body is not valid for this envelope.
        """
        payload = _payload(row)
        field = "inputs" if self.kind == "kservev2" else "instances"
        items = payload.get(field)
        if not isinstance(items, list) or not items:
            raise InvalidInputError(f'the envelope {self.kind} takes {{"{field}": [...]}} with at least one entry')
        if self.kind == "json":
            return Content(_decode_base64(items))
        if self.kind == "kserve":
            return Content(items)
        names = []
        for entry in items:
            if not isinstance(entry, dict) or not {"name", "shape", "datatype", "data"} <= entry.keys():
                raise InvalidInputError("each of the inputs needs name, shape, datatype and data")
            if not isinstance(entry["name"], str) or not isinstance(entry["datatype"], str):
                raise InvalidInputError("name and datatype of each of the inputs must be texts")
            names.append(entry["name"])
        name = payload.get("id") or ""
        if not isinstance(name, (str, int)):
            raise InvalidInputError("id must be a text")
        return Content([_kserve_item(entry) for entry in items], tuple(names), str(name))

    def close(self, content: Content, answers: Sequence[Any], request: Request) -> Any:
        """Returns the body that answers a request, from one answer for each of its items.

        Args:
            content: Its items.
            answers: Answers, and refusals as they are shown to the sender.
            request: The request.
        """
        if self.kind == "json":
            return json.dumps({"predictions": finite(list(answers))})
        if self.kind == "kserve":
            return {"explanations" if request.explains else "predictions": list(answers)}
        return {
            "id": content.request_id or request.id or None,
            "model_name": self._model,
            "model_version": self._version,
            "outputs": [_kserve_output(*pair) for pair in zip(content.names, answers, strict=True)],
        }


def status_of(answers: Sequence[Any]) -> int:
    """Returns the HTTP status of a request with several items: 200, 207 if some failed, the first one's if all did."""
    statuses = [answer.status for answer in answers if isinstance(answer, ItemError)]
    if not statuses:
        return 200
    return statuses[0] if len(statuses) == len(answers) else MULTI_STATUS


def _payload(row: Any) -> dict[str, Any]:
    """Returns a request's JSON object, whether or not the frontend has parsed it."""
    value = (row.get("data") or row.get("body") or row) if isinstance(row, dict) else row
    if isinstance(value, (bytes, bytearray, str)):
        value = parse_json(value)
    if not isinstance(value, dict):
        raise InvalidInputError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _decode_base64(rows: list[Any]) -> list[Any]:
    """Decodes ``{"b64": ...}`` as upstream's JSONEnvelope does: at the top of an instance and one level below."""
    return [_bytes_of(row) if _is_base64(row) else _with_bytes(row) for row in rows]


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"]


def _with_bytes(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    decoded = {key: _bytes_of(value) if _is_base64(value) else value for key, value in row.items()}
    return next((value for value in decoded.values() if isinstance(value, ItemError)), decoded)


def _bytes_of(value: dict[str, Any]) -> Any:
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        return InvalidInputError(f"b64 is not base64: {error}")


def _kserve_item(entry: dict[str, Any]) -> Any:
    """Reads an input as upstream's KServev2Envelope does: a string of BYTES, else the data in its shape.

    Of several strings, which upstream drops but for the first, a list.
    """
    item, what = copy.copy(entry), f"input {entry['name']!r}"
    try:
        _, values = flatten(entry["data"])
        is_text = bool(values) and all(isinstance(value, str) for value in values)
        if entry["datatype"] != _BYTES:
            item["data"] = nested(values, shape_of(entry["shape"], len(values), what, infers=True))
        elif is_text:
            # The shape is not looked at: it is often [-1], as in KServe's own examples.
            item["data"] = values[0] if len(values) == 1 else values
        else:
            return InvalidInputError(f"{what}: data of BYTES must be a list of strings")
    except NotRectangularError as error:
        flaw = "of BYTES must be a list of strings" if entry["datatype"] == _BYTES else "is not rectangular"
        return InvalidInputError(f"{what}: data {flaw}: {error}")
    except InvalidInputError as error:
        return error
    return item


def _kserve_output(name: str, answer: Any) -> dict[str, Any]:
    if hasattr(answer, "__array__") and (array := np.asarray(answer)).dtype.kind in _NUMBERS:
        shape, values = list(array.shape), array.reshape(-1).tolist()
        datatype = "BOOL" if array.dtype.kind == "b" else f"{_NUMBERS[array.dtype.kind]}{array.dtype.itemsize * 8}"
    else:
        shape, values = _elements(answer)
        datatype = _datatype(values)
    return {"name": name, "datatype": datatype, "data": values, "shape": shape or [1]}


def _elements(answer: Any) -> tuple[list[int], list[Any]]:
    """Returns numbers or texts with their shape; of anything else, such as objects, one element for each."""
    shape, values = [len(answer)] if isinstance(answer, list) else [], answer if isinstance(answer, list) else [answer]
    try:
        if _datatype((flat := flatten(answer))[1]) != _BYTES or all(isinstance(item, str) for item in flat[1]):
            shape, values = flat
    except NotRectangularError:
        # Lists of different lengths, such as the entities of several texts.
        pass
    return shape, [float(value) for value in values] if _datatype(values) == "FP64" else list(values)


def _datatype(values: Sequence[Any]) -> str:
    """Returns the protocol's name of the type that holds all values; texts and objects are BYTES."""
    kinds = set(map(type, values))
    if kinds <= {int, float, bool} and (float in kinds or not kinds):
        return "FP64"
    if kinds == {bool}:
        return "BOOL"
    return "INT64" if kinds and kinds <= {int, bool} else _BYTES
