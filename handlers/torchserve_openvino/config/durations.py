"""Times and sizes as people write them: 10m, 8GB."""

import re
from typing import Any

from torchserve_openvino.config.spelling import shown

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
# A year: a longer time is a typo.
_MOST_SECONDS = 366 * 86400.0


def seconds_of(value: Any) -> float:
    """Returns a time in seconds.

    Args:
        value: A number of seconds, or a number with one of the units s, m, h and d: ``90s``, ``10m``, ``1.5h``.

    Raises:
        ValueError: It is something else, not more than 0, or more than a year.
    """
    seconds = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # An integer may be too long for a float.
        seconds = float(value) if abs(value) <= _MOST_SECONDS else None
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds is None or not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"must be a time such as 90s, 10m or 2h, or a number of seconds, not {shown(value)}.")
    return seconds


def bytes_of(value: str) -> int:
    """Returns a size in bytes.

    Args:
        value: A number with one of the units B, KB, MB, GB, TB (powers of 1000) and KiB to TiB (of 1024).

    Raises:
        ValueError: It is something else, or not more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    size = float(match[1]) * _BYTES[match[2].upper()] if match and match[2].upper() in _BYTES else 0
    if not 1 <= size < 2**60:
        raise ValueError(f"must be a size such as 500MB, 8GB or 4GiB, not {value!r:.50}")
    return int(size)
