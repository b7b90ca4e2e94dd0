"""Makes views of one value from each other where the value is also transposed (OpenVINO 2026.4, CPU).

The CPU plugin lets a reshaped value share the memory of its source, and merges a transposition in front of a
convolution with the change to the convolution's layout. Where both happen to one value, and it has two views or more,
the memory is taken for free too early: the convolution reads what another operator wrote since, or values of the call
before. One view of the source, from which the others are made, is computed rightly.
tests/contract/test_openvino_memory.py shows it.
"""

import openvino as ov
from openvino import opset15 as ops

from torchserve_openvino.passes.pass_context import PassContext

_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


def chain_views(model: ov.Model, _: PassContext) -> None:
    """Gives each value that is transposed at most one view, in place."""
    for node in model.get_ordered_ops():
        for value in node.outputs():
            users = [user.get_node() for user in value.get_target_inputs() if user.get_index() == 0]
            views = [user for user in users if user.get_type_name() in _VIEWS]
            if len(views) > 1 and any(user.get_type_name() == "Transpose" for user in users):
                _chain(views)


def _chain(views: list[ov.Node]) -> None:
    first, *others = views
    for view in others:
        shape = view.get_output_partial_shape(0)
        if sum(size.is_dynamic for size in shape) > 1:
            # A shape with several open sizes can't be written down.
            continue
        sizes = [-1 if size.is_dynamic else size.get_length() for size in shape]
        chained = ops.reshape(first, ops.constant(sizes, ov.Type.i64), special_zero=False)
        chained.set_friendly_name(view.get_friendly_name())
        for user in view.output(0).get_target_inputs():
            user.replace_source_output(chained.output(0))
