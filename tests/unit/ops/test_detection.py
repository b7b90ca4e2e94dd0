"""RoIAlign, compared with a reference kernel, because torchvision's wheel cannot be imported everywhere."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import library

import torchserve_openvino as tov

SCHEMA = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio,"
    " bool aligned) -> Tensor"
)


def bilinear(image: torch.Tensor, y: float, x: float) -> torch.Tensor:
    """Samples ``[C, H, W]`` at one point; 0 if the point is more than one pixel outside."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image.new_zeros(image.shape[0])
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    low, right = min(top + 1, height - 1), min(left + 1, width - 1)
    dy, dx = y - top, x - left
    upper = image[:, top, left] * (1 - dx) + image[:, top, right] * dx
    return upper * (1 - dy) + (image[:, low, left] * (1 - dx) + image[:, low, right] * dx) * dy


def roi_align(
    features: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:
    out = features.new_zeros(len(rois), features.shape[1], height, width)
    for r, (item, *box) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (edge * scale - 0.5 * aligned for edge in box)
        least = -math.inf if aligned else 1.0
        bin_h, bin_w = max(y2 - y1, least) / height, max(x2 - x1, least) / width
        rows, columns = (ratio, ratio) if ratio > 0 else (math.ceil(bin_h), math.ceil(bin_w))
        for i in range(height):
            for j in range(width):
                ys = [y1 + bin_h * (i + (a + 0.5) / rows) for a in range(rows)]
                xs = [x1 + bin_w * (j + (b + 0.5) / columns) for b in range(columns)]
                samples = [bilinear(features[int(item)], y, x) for y in ys for x in xs]
                out[r, :, i, j] = sum(samples, torch.zeros(features.shape[1])) / max(1, rows * columns)
    return out


@pytest.fixture(autouse=True)
def operator() -> Iterator[None]:
    """Registers the operator as torchvision does."""
    with library._scoped_library("torchvision", "FRAGMENT") as torchvision:
        torchvision.define(SCHEMA)
        torchvision.impl("roi_align", roi_align, "CPU")
        torchvision.impl(
            "roi_align", lambda x, rois, scale, h, w, ratio, aligned: x.new_empty(len(rois), x.shape[1], h, w), "Meta"
        )
        yield


class Head(torch.nn.Module):
    def __init__(self, scale: float, ratio: int, aligned: bool) -> None:
        super().__init__()
        self.arguments = scale, 3, 2, ratio, aligned

    def forward(self, features: torch.Tensor, rois: torch.Tensor) -> torch.Tensor:
        return torch.ops.torchvision.roi_align(features * 2, rois, *self.arguments).relu()


ROIS = torch.tensor(
    [[0, 1.0, 2.0, 9.0, 11.0], [1, 0, 0, 15, 15], [1, 3.2, 4.1, 3.4, 4.2], [0, -6, -7, 3, 4], [1, 10, 9, 30, 40.0]]
)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [2, 1, 0, -1])
@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_regions_inside_beyond_and_tiny(backend: str, ratio: int, aligned: bool) -> None:
    model = Head(0.5, ratio, aligned).eval()
    compiled = tov.compile(model, backend=backend)
    with torch.no_grad():
        for features, rois in ((torch.randn(2, 4, 8, 8), ROIS), (torch.randn(2, 4, 8, 8), ROIS.flip(0))):
            torch.testing.assert_close(compiled(features, rois), model(features, rois), atol=1e-4, rtol=1e-4)
    assert compiled.report.summary.coverage == 1
