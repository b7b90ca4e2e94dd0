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

Kind = Literal["json", "kserve", "kservev2"]
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
            names.append(str(entry["name"]))
        opened = [_kserve_item(entry) for entry in items]
        return Request(opened, tuple(names), str(payload.get("id") or ""))

    def close(self, request: Request, answers: Sequence[Any], context: Any, index: int) -> Any:
        """Returns the body that answers a request, from one answer for each of its items.

        Args:
            answers: Answers, and refusals as they are shown to the sender.
            context: The call's context, which names the model.
            index: The request's place in the batch.
        """
        if self.kind == "json":
            return json.dumps({"predictions": list(answers)})
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
        try:
            value = json.loads(value)
        except RecursionError as error:
            raise InvalidInputError("the body is JSON that is nested too deep") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidInputError(f"the body is not valid JSON: {error}") from error
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
    item = copy.copy(entry)
    if entry["datatype"] == "BYTES":
        strings = _strings(entry["data"])
        if not strings:
            return InvalidInputError(f"input {entry['name']!r}: data of BYTES must be a list of strings")
        item["data"] = strings[0] if len(strings) == 1 else strings
        return item
    try:
        item["data"] = np.array(entry["data"]).reshape(tuple(entry["shape"])).tolist()
    except (ValueError, TypeError, IndexError, KeyError) as error:
        return InvalidInputError(f"input {entry['name']!r}: {error}")
    return item


def _strings(data: Any) -> list[str]:
    """Returns the strings of BYTES; nothing if there is something else among them.

    The shape is not looked at: it is often [-1], as in KServe's own examples.
    """
    values = np.array(data, dtype=object).flatten().tolist()
    return values if all(isinstance(value, str) for value in values) else []


def _kserve_output(name: str, answer: Any) -> dict[str, Any]:
    array = _array(answer)
    shape = list(array.shape) or [1]
    return {"name": name, "datatype": _datatype(array.dtype), "data": array.flatten().tolist(), "shape": shape}


def _datatype(dtype: np.dtype) -> str:
    """Returns the protocol's name of a type."""
    if dtype.kind == "f":
        return f"FP{dtype.itemsize * 8}"
    kinds = {"b": "BOOL", "i": f"INT{dtype.itemsize * 8}", "u": f"UINT{dtype.itemsize * 8}"}
    return kinds.get(dtype.kind, "BYTES")


def _array(answer: Any) -> np.ndarray:
    """Returns numbers or strings in their shape; of anything else, such as objects, one element for each."""
    try:
        array = np.array(answer)
        if array.dtype.kind != "O" or not isinstance(answer, list):
            return array
    except ValueError:
        # Lists of different lengths, such as the entities of several texts.
        pass
    elements = np.empty(len(answer), dtype=object)
    for position, each in enumerate(answer):
        elements[position] = each
    return elements
