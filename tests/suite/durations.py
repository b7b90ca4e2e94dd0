"""How long tests took, as `scripts/test_results.py --write-durations` noted it: tests/durations.json."""

import functools
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
_SHORT = 0.5
# Of a test that is new.
_USUAL = 1.0


def of(item: pytest.Item) -> float:
    """Returns the seconds that a case of a test takes, its share of fixtures included."""
    return _known().get(item.nodeid.partition("[")[0], _USUAL)


def is_short(item: pytest.Item) -> bool:
    """Checks whether a test takes half a second at most, and starts no server."""
    return item.get_closest_marker("e2e") is None and of(item) <= _SHORT


@functools.cache
def _known() -> dict[str, float]:
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}
