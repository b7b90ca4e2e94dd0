"""Detectors: boxes selected by their scores, then by torchvision's `batched_nms`, which a stand-in replaces here."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov

THRESHOLD = 0.5


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Does what torchvision's function does, also branching on the number of boxes."""
    if boxes.numel() == 0:
        return torch.empty((0,), dtype=torch.int64)
    if any(tensor.dtype is not torch.float32 for tensor in (boxes, scores)) and not torch.is_autocast_enabled("cpu"):
        raise NotImplementedError("torchvision's kernel has no such type")
    order = scores.argsort(descending=True, stable=True).tolist()
    kept: list[int] = []
    for i in order:
        near = [idxs[i] == idxs[k] and (boxes[i] - boxes[k]).abs().max() < iou_threshold for k in kept]
        if not any(near):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


@pytest.fixture(autouse=True)
def boxes_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("torchvision.ops.boxes")
    module.batched_nms = batched_nms  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.ops.boxes", module)
    yield


class Detector(nn.Module):
    """Selects candidates by level in a loop, as RetinaNet does, and by mask, as SSD does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.classes, self.boxes = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(image).relu()
        boxes, scores, labels = [], [], []
        for level in (features, nn.functional.max_pool2d(features, 2)):
            found = (self.classes(level) + bias).sigmoid().flatten()
            every = self.boxes(level).flatten(2)[0].T.repeat(2, 1)
            keep = found > THRESHOLD
            places = torch.where(keep)[0]
            found = found[keep]
            found, best = found.topk(min(12, places.size(0)))
            places = places[best]
            boxes.append(every[places])
            scores.append(found)
            labels.append(torch.div(places, level.shape[2] * level.shape[3], rounding_mode="floor"))
        together = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
        kept = batched_nms(*together, 0.1)[:10]
        return together[0][kept], together[1][kept], together[2][kept]


def _calls() -> list[tuple[Tensor, Tensor]]:
    """Returns inputs with which many boxes, none, and more reach the threshold."""
    torch.manual_seed(0)
    image = torch.rand(1, 3, 8, 8)
    return [(image, torch.tensor(value)) for value in (0.0, -50.0, 1.0, 0.0)]


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_a_detector_is_one_graph(backend: str) -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    compiled = tov.compile(model, backend=backend, dynamic=False, options={"min_partition_us": 0})
    with torch.no_grad():
        for arguments in _calls():
            for result, expected in zip(compiled(*arguments), model(*arguments), strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    report = compiled.report.to_dict()
    if backend != "openvino":
        # TorchScript's converter has no `topk` of a symbolic number; torch.export refuses the branches on sizes.
        return
    assert report["summary"]["graph_breaks"] == 0 and report["summary"]["graphs"] == 1
    left = {each["op"]: each["kind"] for each in report["fallbacks"]}
    assert left == {"aten.nonzero.default": "unsupported_op", "openvino_kept.batched_nms.default": "unsupported_op"}


def test_a_single_box() -> None:
    class One(nn.Module):
        def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            places = torch.where(scores > THRESHOLD)[0]
            boxes, scores = boxes[places] * 2, scores[places]
            kept = batched_nms(boxes, scores, torch.zeros_like(places), 0.1)
            return (boxes[kept] + scores[kept][:, None]).relu(), scores[kept].exp()

    model = One().eval()
    compiled = tov.compile(model, dynamic=False, options={"min_partition_us": 0})
    boxes = torch.rand(6, 4)
    with torch.no_grad():
        for scores in (torch.eye(6)[2], torch.zeros(6), torch.linspace(0, 1, 6)):
            for result, expected in zip(compiled(boxes, scores), model(boxes, scores), strict=True):
                torch.testing.assert_close(result, expected)
    assert compiled.report.to_dict()["summary"]["graph_breaks"] == 0


@pytest.mark.parametrize("average", [lambda x: x.mean(), lambda x: x.mean(0), lambda x: x.std(0), lambda x: x.sum(0)])
def test_an_average_of_no_boxes(average: Callable[[Tensor], Tensor]) -> None:
    """In OpenVINO it is 0."""

    def model(boxes: Tensor, scores: Tensor) -> Tensor:
        places = torch.where(scores > THRESHOLD)[0]
        kept = batched_nms(boxes, scores, places, 0.1) if boxes.shape[0] > 9 else places
        return average(boxes[kept] * 2)

    compiled = tov.compile(model, dynamic=False, options={"min_partition_us": 0})
    boxes = torch.rand(6, 4)
    with torch.no_grad():
        for scores in (torch.zeros(6), torch.linspace(0, 1, 6)):
            torch.testing.assert_close(compiled(boxes, scores), model(boxes, scores), equal_nan=True)
    assert compiled.report.to_dict()["summary"]["graph_breaks"] == 0


def test_an_average_of_nothing_in_an_exported_graph() -> None:
    class Selected(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2)[x > 0].mean()

    model = Selected().eval()
    compiled = tov.compile(model, backend="export", options={"min_partition_us": 0})
    for x in (torch.tensor([1.0, -1.0, 3.0]), -torch.ones(3)):
        torch.testing.assert_close(compiled(x), model(x), equal_nan=True)


def test_autocast_reaches_the_kernel() -> None:
    model = Detector().eval()
    compiled = tov.compile(model, dynamic=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        image, bias = _calls()[0]
        assert compiled(image, bias)[0].shape[1] == model(image, bias)[0].shape[1] == 4


def test_gradients_pass_through_the_selected_boxes() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    image, bias = _calls()[0]
    compiled = tov.compile(model, dynamic=False)
    compiled(image, bias)[1].sum().backward()
    result = model.classes.weight.grad.clone()
    model.zero_grad()
    model(image, bias)[1].sum().backward()
    torch.testing.assert_close(result, model.classes.weight.grad)


def test_a_model_without_detection_still_breaks_its_graph() -> None:
    def model(x: Tensor) -> Tensor:
        return x[x > 0].exp()

    compiled = tov.compile(model, dynamic=False)
    x = torch.tensor([1.0, -1.0, 2.0])
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.to_dict()["summary"]["graph_breaks"] > 0
