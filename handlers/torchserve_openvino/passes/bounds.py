"""The values that an input of a partition may hold. Light to import: a worker that starts warm reads them."""

from typing import NamedTuple


class Bounds(NamedTuple):
    """The values that an integer input may hold.

    Attributes:
        op: The operator that sets the bounds; empty if the type's range or indexing does.
        first: The value that the first element must have; None if any is allowed.
        last: The same for the last element.
    """

    low: int
    high: int
    op: str = ""
    first: int | None = None
    last: int | None = None


class Limits(NamedTuple):
    """Limits that keep a subgraph's integers exact at symbolic sizes up to one.

    Attributes:
        size: The largest symbolic size for which they are exact, and sums keep their digits.
        values: Bounds of each int64 or int32 input, and of each float that is cast to one, by node name; no entry if
            any value is allowed.
    """

    size: int
    values: dict[str, Bounds]
