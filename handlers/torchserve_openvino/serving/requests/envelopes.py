"""TorchServe's request envelopes (`service_envelope` in config.properties), with batches and isolation.

TorchServe 0.12's own `json` fails a whole batch for one bad request; its `kserve` and `kservev2` read only the first
request of a batch, and TorchServe answers 503 to all when the number of answers differs. The frontend chooses the
envelope, which wraps a handler before the handler is initialized. So `take_over` replaces the `handle` of those three
classes, for this package's handlers; any other handler keeps upstream's. tests/contract pins what this relies on.
"""

import base64
import binascii
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.base import HAS_TORCHSERVE, worker_of
from torchserve_openvino.serving.requests.json_body import parse_json
from torchserve_openvino.serving.requests.nested_lists import NotRectangularError, flatten, nested, shape_of
from torchserve_openvino.serving.requests.response_body import finite

Kind = Literal["json", "kserve", "kservev2"]
_BYTES = "BYTES"
# The protocol's names of NumPy's kinds of numbers.
_NUMBERS = {"f": "FP", "i": "INT", "u": "UINT", "b": "BOOL"}
MULTI_STATUS = 207


@dataclass(frozen=True)
class Request:
    """One request's items, and the names and id that its answer repeats."""

    items: list[Any]
    names: tuple[str, ...] = ()
    request_id: str = ""


class Envelope:
    """One kind of envelope.

    Args:
        kind: TorchServe's name for it.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def open(self, row: Any) -> Request:
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
            return Request(_decode_base64(items))
        if self.kind == "kserve":
            return Request(items)
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
        return Request([_kserve_item(entry) for entry in items], tuple(names), str(name))

    def close(self, request: Request, answers: Sequence[Any], context: Any, index: int) -> Any:
        """Returns the body that answers a request, from one answer for each of its items.

        Args:
            answers: Answers, and refusals as they are shown to the sender.
            context: The call's context, which names the model.
            index: The request's place in the batch.
        """
        if self.kind == "json":
            return json.dumps({"predictions": finite(list(answers))})
        if self.kind == "kserve":
            explained = context.get_request_header(index, "explain") == "True"
            return {"explanations" if explained else "predictions": list(answers)}
        model = context.manifest.get("model", {})
        return {
            "id": request.request_id or context.get_request_id(index),
            "model_name": model.get("modelName"),
            "model_version": model.get("modelVersion"),
            "outputs": [_kserve_output(*pair) for pair in zip(request.names, answers, strict=True)],
        }


def status_of(answers: Sequence[Any]) -> int:
    """Returns the HTTP status of a request with several items: 200, 207 if some failed, the first one's if all did."""
    statuses = [answer.status for answer in answers if isinstance(answer, ItemError)]
    if not statuses:
        return 200
    return statuses[0] if len(statuses) == len(answers) else MULTI_STATUS


def take_over() -> None:
    """Lets the workers of handlers answer enveloped requests; safe to call more than once."""
    if not HAS_TORCHSERVE:
        return
    from ts.torch_handler.request_envelope.base import BaseEnvelope
    from ts.torch_handler.request_envelope.json import JSONEnvelope
    from ts.torch_handler.request_envelope.kserve import KServeEnvelope
    from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope

    kinds: tuple[tuple[Any, Kind], ...] = (
        (JSONEnvelope, "json"), (KServeEnvelope, "kserve"), (KServev2Envelope, "kservev2"),
    )  # fmt: skip
    for cls, kind in kinds:
        cls.handle = _handle_for(Envelope(kind), BaseEnvelope.handle)


def _handle_for(envelope: Envelope, upstream: Any) -> Any:
    def handle(self: Any, data: list[dict[str, Any]], context: Any) -> Any:
        worker = worker_of(getattr(self._handle_fn, "__self__", None))
        return upstream(self, data, context) if worker is None else worker.handle_envelope(envelope, data, context)

    return handle


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
    return {key: _bytes_of(value) if _is_base64(value) else value for key, value in row.items()}


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
        if _datatype((flat := flatten(answer))[1]) != _BYTES or all(isinstance(each, str) for each in flat[1]):
            shape, values = flat
    except NotRectangularError:
        # Lists of different lengths, such as the entities of several texts.
        pass
    return shape, [float(each) for each in values] if _datatype(values) == "FP64" else list(values)


def _datatype(values: Sequence[Any]) -> str:
    """Returns the protocol's name of the type that holds all values; texts and objects are BYTES."""
    kinds = set(map(type, values))
    if kinds <= {int, float, bool} and (float in kinds or not kinds):
        return "FP64"
    if kinds == {bool}:
        return "BOOL"
    return "INT64" if kinds and kinds <= {int, bool} else _BYTES
