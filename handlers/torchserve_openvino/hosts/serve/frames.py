"""Messages between the server's front process and a worker: JSON with bytes behind it, over a socket of their own.

Nothing is unpickled: a message is data, whoever wrote it.
"""

import asyncio
import json
import struct
from typing import Any, NamedTuple

# Bytes of the JSON and bytes behind it.
_LENGTHS = struct.Struct(">IQ")
# A report of a large model has a few megabytes.
MOST_HEAD_BYTES = 64 << 20
MOST_BODY_BYTES = 4 << 30


class Frame(NamedTuple):
    """One message.

    Attributes:
        head: JSON; its key ``kind`` says what it is.
        body: Bytes that belong to it.
    """

    head: dict[str, Any]
    body: bytes = b""


def packed(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Returns a message as it is sent."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


async def read_frame(reader: asyncio.StreamReader, *, trusted: bool = False) -> Frame | None:
    """Reads the next message; returns None once the other side is gone.

    Args:
        reader: Where it comes from.
        trusted: Whether its length has no limit: the front process has limited each request already, and a message has
            a whole batch of them.

    Raises:
        ValueError: What comes is no message, or too long.
    """
    try:
        head_bytes, body_bytes = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if not trusted and (head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES):
            raise ValueError(f"a message between processes has {head_bytes} + {body_bytes} bytes")
        head = json.loads(await reader.readexactly(head_bytes))
        return Frame(head, await reader.readexactly(body_bytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
