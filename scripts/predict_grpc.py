"""Sends a file to a model over TorchServe's gRPC, and prints the answer.

`python scripts/predict_grpc.py net cat.jpg`

The messages are encoded here, by the rules of Protocol Buffers, so that nothing has to be generated: a request is
`PredictionsRequest {string model_name = 1; string model_version = 2; map<string, bytes> input = 3}`, its answer
`PredictionResponse {bytes prediction = 1}`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
MOST_BYTES = 64 * 1024 * 1024


def field(number: int, content: bytes) -> bytes:
    """A field of a message: its number, the length of its content in groups of seven bits, its content."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def content(message: bytes) -> bytes:
    """The content of the only field of a message; nothing if that is empty."""
    size, position = 0, 0
    for position, byte in enumerate(message[1:]):
        size |= (byte & 127) << 7 * position
        if byte < 128:
            break
    return message[position + 2 :][:size]


def predict(address: str, model: str, body: bytes, version: str = "", timeout: float = 60.0) -> bytes:
    """Returns a model's answer.

    Raises:
        grpc.RpcError: The model refuses the request, or does not answer.
    """
    named = field(1, model.encode()) + (field(2, version.encode()) if version else b"")
    request = named + field(3, field(1, b"data") + field(2, body))
    options = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.max_send_message_length", MOST_BYTES)]
    with grpc.insecure_channel(address, options=options) as channel:
        return content(channel.unary_unary(METHOD)(request, timeout=timeout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model's name")
    parser.add_argument("file", type=Path, help="the request's body")
    parser.add_argument("--version", default="", help="the model's version; its default one if not given")
    parser.add_argument("--address", default="127.0.0.1:7070", help="TorchServe's gRPC address")
    arguments = parser.parse_args()
    try:
        answer = predict(arguments.address, arguments.model, arguments.file.read_bytes(), arguments.version)
    except grpc.RpcError as error:
        print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(answer + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
