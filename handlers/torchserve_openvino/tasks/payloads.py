"""Files that come as base64 in JSON."""

import base64
import binascii

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError


def from_base64(text: str, *, what: str, max_bytes: int, key: str) -> bytes:
    """Decodes a file.

    Args:
        text: Base64, or a data: URL of it.
        what: What the file is, for messages: ``picture``.
        max_bytes: Its largest size.
        key: The configuration key that sets this size.

    Raises:
        PayloadTooLargeError: It is larger.
        InvalidInputError: It is not base64.
    """
    payload = text.split(",", 1)[1] if text.startswith("data:") and "," in text else text
    # Four base64 characters encode three bytes.
    size = len(payload) * 3 // 4
    if size > max_bytes + 2:
        raise PayloadTooLargeError(f"the {what} has about {size} bytes, more than {key} {max_bytes}")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"the text is not base64 of a {what}: {error}") from error
