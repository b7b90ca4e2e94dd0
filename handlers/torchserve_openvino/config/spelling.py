"""Finds the nearest valid name for a misspelt one, and formats values for messages."""

import difflib
from collections.abc import Iterable
from typing import Any

TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})
_LONGEST_NAME = 200


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the candidate most similar to ``name``, ignoring case; None if none is close.

    Args:
        name: What the user wrote.
        candidates: Valid names.
        cutoff: Minimum similarity in 0..1 (the ratio of `difflib.SequenceMatcher`).
    """
    if len(name) > _LONGEST_NAME:
        # No misspelt name is that long, and a comparison takes time that grows with its length.
        return None
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def parse_bool(value: Any) -> bool | None:
    """Returns True or False for a bool, 0, 1 or the usual words; None for anything else."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word in TRUE_WORDS:
        return True
    return False if word in FALSE_WORDS else None


def shown(value: Any, width: int = 60) -> str:
    """Returns the ``repr`` of a value, shortened so that a message stays on one line."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def listed(names: Iterable[str]) -> str:
    """Joins names for a message: ``a, b, c``, or ``none``."""
    return ", ".join(names) or "none"
