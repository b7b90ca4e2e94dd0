"""Parts of the suite that take equally long, so that the whole can run in several sittings or on several machines."""

import argparse
from typing import NamedTuple

import pytest

from suite import durations


class Part(NamedTuple):
    """One of several parts, counted from 1."""

    number: int
    of: int


def part(text: str) -> Part:
    """Reads ``K/N``.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part, such as 2/6")
    return Part(int(number), int(of))


def items_of(part: Part, items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests of a part, in order: neighbors stay together, since they share models and servers."""
    seconds = [durations.of(item) for item in items]
    total, before, chosen = sum(seconds), 0.0, []
    for item, each in zip(items, seconds, strict=True):
        middle = before + each / 2
        before += each
        if min(int(middle * part.of / total), part.of - 1) == part.number - 1:
            chosen.append(item)
    return chosen
