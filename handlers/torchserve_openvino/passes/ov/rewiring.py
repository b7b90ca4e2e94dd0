"""Puts a value in place of another in an ov.Model."""

from collections.abc import Callable

import openvino as ov


def put_behind(value: ov.Output, make: Callable[[ov.Output], ov.Node]) -> None:
    """Replaces a value with ``make(value)`` for all its users."""
    users = list(value.get_target_inputs())
    output = make(value).output(0)
    for user in users:
        user.replace_source_output(output)
