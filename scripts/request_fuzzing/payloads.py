"""Hostile values, files and texts: what a client can put into a request so that it costs, breaks or confuses."""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

BINARY, JSON, TEXT = "application/octet-stream", "application/json", "text/plain"
_DIGITS = 5000
_DTYPES = (
    "quint8", "qint8", "qint32", "quint4x2", "bits8", "bits16", "bits1x8", "uint1", "int3", "float8_e4m3fn",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "uint64", "float16", "bool", "nn", "long", "",
)  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """A request's body.

    Attributes:
        label: What it is, for reports.
        body: Its bytes.
        content_type: Its type.
        path: What follows the model's name in the URL.
    """

    label: str
    body: bytes
    content_type: str = BINARY
    path: str = ""

    @staticmethod
    def of_json(label: str, value: Any, path: str = "") -> Payload:
        return Payload(label, json.dumps(value).encode(), JSON, path)


def hostile_value(rng: random.Random) -> Any:
    """Returns a value that a field of a JSON request rarely has."""
    return rng.choice(_VALUES)(rng)


_VALUES: Sequence[Callable[[random.Random], Any]] = (
    lambda _: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**24, 10**400]),
    lambda rng: rng.choice([1e-300, 5e-324, 1.8e308, -0.0, 1e39, float("nan"), float("inf"), float("-inf"), 0.5]),
    lambda rng: rng.choice(["", " ", "\x00", "\ud800", "a\udfff", "\u202e", "ﷺ" * 50, "💥", "NaN", "1", "[MASK]"]),
    lambda rng: "x" * rng.choice([300, 70_000]),
    lambda rng: " ".join(["word"] * rng.choice([600, 20_000])),
    lambda rng: "{}" * rng.choice([1, 5000]),
    lambda rng: [] if rng.random() < 0.5 else {},
    lambda rng: [[]] * rng.randint(1, 3),
    lambda rng: [[1, 2], [3]],
    lambda rng: ["a" * 50_000, *["b"] * rng.choice([10, 5000])],
    lambda rng: [0] * rng.choice([1, 1000, 200_000]),
    lambda rng: ["\ud800"],
    lambda rng: _deep(rng.choice([20, 70, 300])),
    lambda rng: {"b64": rng.choice(["", "!", "AAAA", "QQ==", 5, None])},
    lambda rng: rng.choice(_DTYPES),
    lambda rng: [0, 10**24],
    lambda rng: [2**31, 2**31, 2**31],
)


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def mutated(value: Any, rng: random.Random) -> tuple[str, Any]:
    """Returns a copy of JSON with one place changed, and what was done there."""
    value = copy.deepcopy(value)
    places = list(_places(value, ()))
    path = rng.choice(places)
    action = rng.choice(["replace", "replace", "replace", "drop", "rename", "repeat", "add"])
    if not path:
        return "replaced all", hostile_value(rng)
    parent: Any = value
    for step in path[:-1]:
        parent = parent[step]
    key, where = path[-1], ".".join(map(str, path))
    if action == "drop":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[rng.choice(["", "x" * 1000, "\ud800", key.upper(), f"{key}s"])] = parent.pop(key)
    elif action == "repeat" and isinstance(parent, list):
        parent *= rng.choice([2, 65, 500])
    elif action == "add" and isinstance(parent, dict):
        parent[rng.choice(["extra", "dtype", "id", "parameters", "stream", "n"])] = hostile_value(rng)
    else:
        action, parent[key] = "replace", hostile_value(rng)
    return f"{action} {where}", value


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value[:20]):
            yield from _places(item, (*path, number))


def broken_json(valid: Any, rng: random.Random) -> Payload:
    """Returns JSON text that no `json.dumps` writes, or that a parser trips over."""
    text = json.dumps(valid).encode()
    kind = rng.choice(
        ["cut", "flip", "digits", "deep", "deep objects", "twice", "bare", "bom", "latin", "utf-16", "many"]
    )
    body = {
        "cut": lambda: text[: rng.randrange(len(text))],
        "flip": lambda: flipped(text, rng),
        "digits": lambda: (
            text[:-1] + b',"inputs":' + b"9" * _DIGITS + text[-1:] if text[-1:] == b"}" else b"9" * _DIGITS
        ),
        "deep": lambda: b"[" * rng.choice([500, 100_000]) + b"]" * rng.choice([0, 500]),
        "deep objects": lambda: b'{"a":' * rng.choice([500, 50_000]),
        "twice": lambda: text + text,
        "bare": lambda: rng.choice(
            [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null", b'"\\ud800"', b"-", b"1" * 400]
        ),
        "bom": lambda: b"\xef\xbb\xbf" + text,
        "latin": lambda: text.replace(b"a", b"\xe4", 1),
        "utf-16": lambda: text.decode().encode("utf-16"),
        "many": lambda: b"[" + b",".join([b"[]"] * rng.choice([1000, 300_000])) + b"]",
    }[kind]()
    return Payload(f"JSON, {kind}", body, JSON)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Returns data with a few bytes changed."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 3, 20])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def npy(rng: random.Random) -> Payload:
    """Returns a file in NumPy's format whose header claims what is not there, or is no header."""
    descr = rng.choice([
        "|S0", "<U0", "|S1", "<U4", "<f4", "<f8", ">f4", "<f2", "<f16", "<c8", "<c32", "|b1", "<i8", "|O", "|V0", "|V8",
        "<M8[s]", "<m8", "<x9", "", "f4,f4", "<f4" * 500,
    ])  # fmt: skip
    shape = rng.choice([
        "(2000000000,)", "(1, 4)", "()", "(0, 4)", "(0, 1000000000000000000000000)", "(-1,)", "(1, -4)", "(True, 4)",
        "(1.0, 4)", "4", "None", "(1,)*99", "(2**40,)", f"({'1,' * 70})", f"({'9' * 400},)",
    ])  # fmt: skip
    header = rng.choice([
        f"{{'descr': '{descr}', 'fortran_order': {rng.choice(['False', 'True', '0', 'None'])}, 'shape': {shape}}}",
        f"{{'descr': '{descr}', 'shape': {shape}}}", "{" * 3000, "(" * 500, "{'descr': __import__('os')}", "",
        "\x00" * 64,
    ])  # fmt: skip
    raw = header.encode("latin-1", "replace") + b"\n"
    major = rng.choice([1, 1, 1, 2, 3, 4, 255])
    length = struct.pack("<H" if major == 1 else "<I", min(65535, rng.choice([len(raw), len(raw), 0, 65535])))
    data = np.ones(4, dtype=np.float32).tobytes() * rng.choice([0, 1, 1, 4])
    return Payload(f"npy {major}.0 {header[:80]!r}", b"\x93NUMPY" + bytes([major, 0]) + length + raw + data)


def picture(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), 90 if mode == "1" else "grey").save(buffer, kind)
    return buffer.getvalue()


def hostile_picture(rng: random.Random) -> tuple[str, bytes]:
    """Returns a picture that is large, thin, damaged or of a kind that nobody asked for, and what it is."""
    kind = rng.choice(["thin", "large", "bomb", "cut", "flip", "header", "eps", "other", "tiny", "tag"])
    if kind == "thin":
        size = rng.choice([(1, 6000), (6000, 1), (1, 60_000), (2, 300), (1, 199), (3, 700)])
        return f"picture {size}", picture(*size)
    if kind == "large":
        side = rng.choice([3000, 4500, 9000])
        return f"picture {side} x {side}", picture(side, side, mode="1")
    if kind == "bomb":
        return "picture of 400 million pixels", picture(20_000, 20_000, mode="1")
    if kind == "eps":
        return "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n{ 1 pop } loop\n%%EOF\n"
    if kind == "other":
        form = rng.choice(["PPM", "TGA", "ICO", "JPEG2000", "PCX", "SGI", "PDF", "DDS", "ICNS"])
        return form, picture(64, 64, form)
    if kind == "tiny":
        return "picture 1 x 1", picture(1, 1, rng.choice(["PNG", "GIF", "BMP", "WEBP", "TIFF", "JPEG"]))
    whole = picture(rng.randint(20, 90), rng.randint(20, 90), rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
    if kind == "cut":
        return "cut picture", whole[: rng.randrange(len(whole))]
    if kind == "flip":
        return "flipped picture", flipped(whole, rng)
    if kind == "tag":
        return "PNG with an inflating text", _png_with_text()
    return "PNG whose header claims much", _png_claiming(
        rng.choice([(2**31 - 1, 2**31 - 1), (50_000, 50_000), (0, 0), (9000, 9000)])
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_claiming(size: tuple[int, int]) -> bytes:
    head = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + _chunk(b"IEND", b"")
    )


def _png_with_text() -> bytes:
    whole = picture(30, 20)
    text = _chunk(b"zTXt", b"key\0\0" + zlib.compress(b"a" * 100_000_000, 1))
    return whole[:33] + text + whole[33:]


def sound(seconds: float, rate: int = 16_000, channels: int = 1, tone: float = 220.0) -> bytes:
    """Returns a WAV file of 16 bits with a tone."""
    time = np.arange(int(seconds * rate)) / rate
    samples = np.repeat((8000 * np.sin(2 * np.pi * tone * time)).astype("<i2")[:, None], channels, axis=1)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def hostile_sound(rng: random.Random) -> tuple[str, bytes]:
    """Returns a recording that is long, has an odd header, or is damaged, and what it is."""
    kind = rng.choice(["rate", "long", "channels", "cut", "flip", "short", "words"])
    if kind == "rate":
        rate = rng.choice([1, 999, 700_000, 2_000_000])
        return f"sound at {rate} Hz", sound(0.2 if rate > 1000 else 3, rate)
    if kind == "long":
        return "long sound", sound(120, 8000)
    if kind == "channels":
        return "sound of 200 channels", sound(0.1, 8000, 200)
    if kind == "short":
        return "short sound", sound(rng.choice([0.0, 0.001, 0.02]))
    if kind == "words":
        return "no sound", rng.randbytes(500)
    whole = sound(0.3)
    return (
        f"{kind} sound",
        whole[: rng.randrange(len(whole))] if kind == "cut" else flipped(whole[:60], rng) + whole[60:],
    )


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
