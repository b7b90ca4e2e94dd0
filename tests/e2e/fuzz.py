"""Generates good and bad requests from a seed, each with the expected status and a check of its answer."""

import base64
import functools
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage import data

from encoder import encoder
from torchserve_openvino.config.sections.task_sections import ImageSection
from torchserve_openvino.tasks.picture_transforms import to_tensor

MAX_LENGTH, VOCABULARY = 16, 50


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        kind: Description for the message of a failed test.
        statuses: Accepted HTTP statuses.
        check: Compares the body of a 200 with eager's answer; None for a bad item.
    """

    kind: str
    body: bytes
    content_type: str
    statuses: tuple[int, ...] = (200,)
    check: Callable[[bytes], bool] | None = None


class Photos:
    """Photos of several sizes and formats, and bodies that are not photos.

    Args:
        model: The classifier in eager PyTorch; maps ``[1, 3, 224, 224]`` to logits.
        labels: Names of the classes.
    """

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], labels: list[str]) -> None:
        self._model, self._labels = model, labels
        self._sources = [data.chelsea(), data.coffee(), data.rocket(), data.astronaut()]
        self._known: dict[bytes, dict[str, float]] = {}

    def _encoded(self, rng: random.Random) -> tuple[str, bytes]:
        """A photo in a random size and format, and its description."""
        picture = Image.fromarray(rng.choice(self._sources))
        width, height = rng.choice([(224, 224), (97, 301), (300, 200), (451, 300)])
        picture = picture.resize((width, height))
        if rng.random() < 0.2:
            picture = picture.convert("L")
        buffer = io.BytesIO()
        form = rng.choice(["JPEG", "PNG", "WEBP"])
        picture.save(buffer, form)
        return f"{form} {width}x{height}", buffer.getvalue()

    def good(self, rng: random.Random) -> Item:
        """A resized photo; eager's answer is computed once for each body."""
        kind, raw = self._encoded(rng)
        expected = self._expected(raw)
        body, content_type = raw, "application/octet-stream"
        if rng.random() < 0.3:
            body, content_type = base64.b64encode(raw), "text/plain"
        return Item(kind, body, content_type, check=lambda answer: _same_labels(answer, expected))

    def _expected(self, raw: bytes) -> dict[str, float]:
        if raw not in self._known:
            with torch.inference_mode():
                scores = torch.softmax(self._model(to_tensor(raw, ImageSection()).unsqueeze(0)), dim=1)[0]
            self._known[raw] = {self._labels[i]: float(scores[i]) for i in range(len(scores))}
        return self._known[raw]

    def bad(self, rng: random.Random) -> Item:
        """Damaged, huge, empty, or not an image at all."""
        _, raw = self._encoded(rng)
        choices = {
            "random bytes": (rng.randbytes(rng.randint(1, 3000)), (415,)),
            "empty": (b"", (400,)),
            "truncated": (raw[: max(10, len(raw) // 3)], (400, 415)),
            "truncated base64": (base64.b64encode(raw)[: len(raw) // 3], (400, 415)),
            "bomb": (_bomb(), (413,)),
            "words": (b"this is a photo of a cat", (400,)),
            "array of another shape": (json.dumps({"data": [[1, 2], [3]]}).encode(), (400,)),
        }
        kind = rng.choice(sorted(choices))
        body, statuses = choices[kind]
        content_type = {"words": "text/plain", "array of another shape": "application/json"}.get(
            kind, "application/octet-stream"
        )
        return Item(kind, body, content_type, statuses)


class Tokens:
    """Token ids of all lengths in three formats, and inputs that the model does not accept."""

    def __init__(self) -> None:
        self._model = encoder()

    def good(self, rng: random.Random) -> Item:
        rows, length = rng.randint(1, 3), rng.randint(1, MAX_LENGTH)
        ids = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(rows)]
        with torch.inference_mode():
            expected = {name: value.numpy() for name, value in self._model(torch.tensor(ids)).items()}
        form = rng.choice(["json", "npy", "kserve"])
        kind = f"{form} {rows}x{length}"
        if form == "npy":
            return Item(kind, _npy(np.array(ids)), "application/octet-stream", check=lambda a: _same_npz(a, expected))
        body: dict[str, Any] = {"inputs": {"ids": ids}}
        if form == "kserve":
            flat = [n for row in ids for n in row]
            body = {"inputs": [{"name": "ids", "shape": [rows, length], "datatype": "INT64", "data": flat}], "id": kind}
            return Item(
                kind, json.dumps(body).encode(), "application/json", check=lambda a: _same_v2(a, kind, expected)
            )
        return Item(kind, json.dumps(body).encode(), "application/json", check=lambda a: _same_json(a, expected))

    def bad(self, rng: random.Random) -> Item:
        """Out of range, too long, of a wrong type or shape, malformed, or malicious."""
        ids = [[rng.randrange(VOCABULARY) for _ in range(3)]]
        choices: dict[str, Any] = {
            "id too large": {"inputs": {"ids": [[1, VOCABULARY + rng.randrange(10**6)]]}},
            "negative id": {"inputs": {"ids": [[-rng.randrange(1, 100), 2]]}},
            "too long": {"inputs": {"ids": [[1] * (MAX_LENGTH + rng.randint(1, 50))]}},
            "fractions": {"inputs": {"ids": [[0.5, 1.5]]}},
            "words": {"inputs": {"ids": [["cat", "dog"]]}},
            "ragged": {"inputs": {"ids": [[1, 2], [3]]}},
            "no rows": {"inputs": {"ids": []}},
            "rank 1": {"inputs": {"ids": [1, 2, 3]}},
            "rank 3": {"inputs": {"ids": [[[1]]]}},
            "another name": {"inputs": {"tokens": ids}},
            "nothing known": {"question": 42},
            "mask of another length": {"inputs": {"ids": ids, "mask": [[1]]}},
            "kserve type": {"inputs": [{"name": "ids", "shape": [1, 3], "datatype": "INT65", "data": ids[0]}]},
            "kserve shape": {"inputs": [{"name": "ids", "shape": [7, 3], "datatype": "INT64", "data": ids[0]}]},
            "beyond 64 bits": {"inputs": {"ids": [[2**70]]}},
            "null": {"inputs": {"ids": None}},
            "not JSON": b'{"inputs": {"ids": [[1, 2',
            "float npy": _npy(np.ones((1, 3), dtype=np.float32)),
            "truncated npy": _npy(np.ones((5, 3), dtype=np.int64))[:-9],
            "npy of objects": _npy(np.array([{"a": 1}], dtype=object)),
            "npy that claims terabytes": _npy_claiming((1 << 20, 1 << 20)),
            "npy without rows": _npy(np.ones((0, 3), dtype=np.int64)),
        }
        kind = rng.choice(sorted(choices))
        body = choices[kind]
        if isinstance(body, dict):
            return Item(kind, json.dumps(body).encode(), "application/json", (400,))
        binary = "npy" in kind
        return Item(kind, body, "application/octet-stream" if binary else "application/json", (400, 413))


def _same_labels(body: bytes, expected: dict[str, float]) -> bool:
    answer = json.loads(body)
    best = sorted(expected.values(), reverse=True)[: len(answer)]
    close = all(abs(score - expected[name]) < 1e-3 for name, score in answer.items())
    return close and np.allclose(sorted(answer.values(), reverse=True), best, atol=1e-3)


def _same(got: dict[str, Any], expected: dict[str, np.ndarray]) -> bool:
    return got.keys() == expected.keys() and all(
        np.shape(got[name]) == value.shape and np.allclose(got[name], value, atol=1e-4)
        for name, value in expected.items()
    )


def _same_json(body: bytes, expected: dict[str, np.ndarray]) -> bool:
    return _same(json.loads(body), expected)


def _same_npz(body: bytes, expected: dict[str, np.ndarray]) -> bool:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return _same(dict(arrays), expected)


def _same_v2(body: bytes, request_id: str, expected: dict[str, np.ndarray]) -> bool:
    answer = json.loads(body)
    outputs = {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in answer["outputs"]}
    return answer["id"] == request_id and _same(outputs, expected)


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _npy_claiming(shape: tuple[int, ...]) -> bytes:
    """A header of that shape, followed by 8 bytes only."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return buffer.getvalue() + b"\0" * 8


@functools.cache
def _bomb() -> bytes:
    """A few kilobytes that decode to 400 million pixels."""
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, "PNG")
    return buffer.getvalue()
