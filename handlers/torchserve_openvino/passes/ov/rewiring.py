"""Puts a value in place of another in an ov.Model, and operators between kernels that must stay apart."""

from collections.abc import Callable

import openvino as ov
from openvino import opset15 as ops


def put_behind(value: ov.Output, make: Callable[[ov.Output], ov.Node]) -> None:
    """Replaces a value with ``make(value)`` for all its users."""
    users = list(value.get_target_inputs())
    output = make(value).output(0)
    for user in users:
        user.replace_source_output(output)


def kept_apart(value: ov.Output) -> ov.Node:
    """Returns an operator that changes nothing, and across which OpenVINO neither fuses kernels nor moves a scale."""
    return ops.logical_or(value, value) if value.get_element_type() == ov.Type.boolean else ops.maximum(value, value)
