"""The quick suite, the same at every commit: no tests marked `slow`; of a test marked `quick`, the cases it names.

@pytest.mark.quick("one case", "another-2")  # by their ids
@pytest.mark.quick(rows=[1, 33], head=[128])  # by the values of parameters: all cases with these
"""

from collections import defaultdict
from typing import Any

import pytest


def runs(item: pytest.Item) -> bool:
    """Checks whether a test is in the quick suite."""
    if item.get_closest_marker("slow") is not None:
        return False
    marker = item.get_closest_marker("quick")
    return marker is None or _names(marker, item)


def check(items: list[pytest.Item]) -> None:
    """Checks that each name in a marker is one of a case, since a misspelt one would leave its case out.

    Args:
        items: All cases of the tests.

    Raises:
        pytest.UsageError: A name is none.
    """
    cases = defaultdict[str, list[Any]](list)
    markers: dict[str, pytest.Mark] = {}
    for item in items:
        if (marker := item.get_closest_marker("quick")) is not None:
            test = item.nodeid.partition("[")[0]
            markers[test] = marker
            cases[test].append(item.callspec)  # type: ignore[attr-defined]
    for test, marker in markers.items():
        known = cases[test]
        unknown = [name for name in marker.args if name not in [each.id for each in known]]
        for parameter, values in marker.kwargs.items():
            found = [each.params.get(parameter) for each in known]
            unknown += [f"{parameter}={value!r}" for value in values if value not in found]
        if unknown:
            raise pytest.UsageError(f"{test}: its marker quick names {unknown[0]}, which is no case of it")


def _names(marker: pytest.Mark, item: pytest.Item) -> bool:
    case = item.callspec  # type: ignore[attr-defined]
    if marker.args:
        return case.id in marker.args
    return all(case.params[parameter] in values for parameter, values in marker.kwargs.items())
