"""All passes, in the order in which they run.

A pass is a function that changes a graph, or an ov.Model, in place. Those of the stages ``graph``, ``partition`` and
``model`` run once for a graph, and the cache stores their result. Those of the stage ``device`` run on a copy of the
model each time that it is compiled. The cache's keys hold a digest of each pass (`digests.py`).
"""

import openvino as ov
from torch.fx import Graph

from torchserve_openvino.passes.fx.checks import add_checks
from torchserve_openvino.passes.fx.closed_rows import zero_closed_rows
from torchserve_openvino.passes.fx.comparisons import mirror_comparisons
from torchserve_openvino.passes.fx.complex_parts import take_parts
from torchserve_openvino.passes.fx.constants import insert_constants
from torchserve_openvino.passes.fx.empty_tensors import remove_empty_operands
from torchserve_openvino.passes.fx.float_counts import name_dtype_of_counts
from torchserve_openvino.passes.fx.folding import fold_casts
from torchserve_openvino.passes.fx.limits import derive_ranges, limit_inputs
from torchserve_openvino.passes.fx.masked_casts import mask_casts
from torchserve_openvino.passes.fx.max_pools import keep_infinities
from torchserve_openvino.passes.fx.negative_indices import count_from_start
from torchserve_openvino.passes.fx.originals import join_complex_pairs, restore_operators
from torchserve_openvino.passes.fx.reduced_dimensions import keep_reduced_dimensions
from torchserve_openvino.passes.fx.redundant import drop_checks, drop_round_trips
from torchserve_openvino.passes.fx.renames import drop_renames
from torchserve_openvino.passes.fx.returned_copies import separate_copies
from torchserve_openvino.passes.fx.selected_rows import compute_selected_rows
from torchserve_openvino.passes.fx.weight_integers import fold_closed, mark_closed
from torchserve_openvino.passes.manager import Pass
from torchserve_openvino.passes.ov.attention_operands import repeat_attention_operands
from torchserve_openvino.passes.ov.bf16x3 import in_bf16x3, multiply_in_bf16x3
from torchserve_openvino.passes.ov.constant_parts import fold_constant_parts
from torchserve_openvino.passes.ov.convolution_kernels import widen_kernels
from torchserve_openvino.passes.ov.gated_products import needs_split, split_gated_products
from torchserve_openvino.passes.ov.kernel_fusions import keep_kernels_apart
from torchserve_openvino.passes.ov.long_reductions import keep_digits_of_sums
from torchserve_openvino.passes.ov.low_bits import pack_weights
from torchserve_openvino.passes.ov.narrow_masks import keep_masks_finite, round_masks, rounds_to_bfloat16
from torchserve_openvino.passes.ov.open_lengths import multiply_open_lengths
from torchserve_openvino.passes.ov.precise_values import has_few_digits, keep_sensitive_values
from torchserve_openvino.passes.ov.rectified_convolutions import clamp_rectified
from torchserve_openvino.passes.ov.shared_views import chain_views
from torchserve_openvino.passes.ov.slopes import join_slopes
from torchserve_openvino.passes.ov.weight_packing import keep_orientations_apart
from torchserve_openvino.passes.ov.zero_signs import keep_signs_of_zero

FX_PASSES: tuple[Pass[Graph], ...] = (
    Pass(drop_checks, "graph"),
    Pass(restore_operators, "graph"),
    Pass(join_complex_pairs, "graph"),
    Pass(take_parts, "graph"),
    Pass(drop_round_trips, "graph"),
    Pass(remove_empty_operands, "graph"),
    Pass(mark_closed, "graph"),
    Pass(fold_closed, "partition"),
    # Before anything adds nodes: what is limited are the inputs and operators of the user.
    Pass(limit_inputs, "partition"),
    Pass(drop_renames, "partition"),
    Pass(compute_selected_rows, "partition"),
    Pass(insert_constants, "partition"),
    # Casts that are folded or masked need no check.
    Pass(fold_casts, "partition"),
    Pass(mask_casts, "partition"),
    Pass(derive_ranges, "partition"),
    Pass(add_checks, "partition"),
    # These change the operators of checks as well.
    Pass(zero_closed_rows, "partition"),
    Pass(mirror_comparisons, "partition"),
    Pass(count_from_start, "partition"),
    Pass(name_dtype_of_counts, "partition"),
    Pass(keep_reduced_dimensions, "partition"),
    Pass(separate_copies, "partition"),
    Pass(keep_infinities, "partition"),
)

OV_PASSES: tuple[Pass[ov.Model], ...] = (
    Pass(pack_weights, "model"),
    Pass(multiply_open_lengths, "model"),
    Pass(keep_digits_of_sums, "model"),
    Pass(keep_signs_of_zero, "model"),
    Pass(keep_orientations_apart, "model"),
    Pass(join_slopes, "model"),
    Pass(clamp_rectified, "model"),
    Pass(keep_kernels_apart, "model"),
    Pass(widen_kernels, "model"),
    Pass(repeat_attention_operands, "model"),
    Pass(chain_views, "model"),
    # Last of its stage: the others add operators on constants.
    Pass(fold_constant_parts, "model"),
    Pass(multiply_in_bf16x3, "device", when=in_bf16x3),
    Pass(split_gated_products, "device", when=needs_split),
    Pass(keep_masks_finite, "device", when=rounds_to_bfloat16),
    Pass(round_masks, "device", when=rounds_to_bfloat16),
    Pass(keep_sensitive_values, "device", when=has_few_digits),
)
