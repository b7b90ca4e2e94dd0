"""torchvision's RoIAlign, as its detection models use it. torchvision itself is not needed, nor imported.

Non-maximum suppression is not here: how many boxes are left is known only when it ran, so that Dynamo breaks the graph
there, and torchvision's own kernel runs, counted.
"""

from typing import Any

import numpy as np
from openvino import Output
from openvino import opset15 as ops


def _roi_align(
    features: Output,
    rois: Output,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """Regions of a feature map, each brought to one size by averages of bilinear samples.

    Args:
        features: ``[N, C, H, W]``.
        rois: ``[R, 5]``: the item of the batch, then x1, y1, x2, y2 in pixels of the image.
        spatial_scale: From these pixels to those of ``features``.
        sampling_ratio: Samples for each bin and direction; 0 and less: as many as the region's size asks for.
        aligned: Whether pixels are half a pixel off their corners; otherwise regions are one pixel wide at least.

    Returns:
        ``[R, C, pooled_height, pooled_width]``.
    """
    columns = ops.split(rois, ops.constant(np.int64(1)), 5)
    boxes = ops.concat([columns.output(i) for i in range(1, 5)], 1)
    items = ops.convert(ops.squeeze(columns.output(0), ops.constant(np.array([1], dtype=np.int64))), "i32")
    # OpenVINO reads where it is told to. (torchvision does so too: what it answers then is anybody's guess.)
    items = ops.clamp(items, 0, features.get_shape()[0] - 1)
    return ops.roi_align(
        features, boxes, items, pooled_height, pooled_width, max(sampling_ratio, 0), spatial_scale, "avg",
        "half_pixel_for_nn" if aligned else "asymmetric",
    )  # fmt: skip


DETECTION = {"torchvision.roi_align.default": _roi_align}
