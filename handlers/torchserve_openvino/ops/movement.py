"""Operators that move data and compute nothing: packet names (`aten.view`), for the questions that hang on it."""

from torchserve_openvino.ops.names import packets

# An output's values are values of the inputs, all or some of them, in another order, shape or type.
HANDS_ON = packets("""
    _to_copy _unsafe_view alias as_strided cat chunk clone contiguous detach expand expand_copy flatten flip
    lift_fresh_copy narrow permute permute_copy repeat reshape roll select slice split split_with_sizes squeeze
    squeeze_copy stack t transpose unbind unfold unsqueeze unsqueeze_copy view view_copy
""")
# An output's values are those of one input, chosen by another.
LOOKS_UP = packets("embedding gather index index_select")
# An output's values are stated, or those of an input that is not the first.
FILLS = packets("copy full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like")
COMPARES = packets("eq ne lt le gt ge")
