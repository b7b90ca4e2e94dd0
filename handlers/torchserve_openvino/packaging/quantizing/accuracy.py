"""What a quantized model loses against f32: the share of right classes, F1, agreement, or similarity of outputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchserve_openvino.config.sections.quantize import Metric
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.quantizing.samples import CalibrationSample, Samples, distinct_shapes

Run = Callable[..., Any]
Measure = Literal["top1", "f1", "agreement", "cosine"]


@dataclass(frozen=True)
class Score:
    """How a model did.

    Attributes:
        value: Of the metric, 0 to 1 (cosine: -1 to 1); more is better.
        seconds: Median time of a call.
    """

    value: float
    seconds: float


class AccuracyComparison:
    """Compares models on the same requests.

    Args:
        samples: The requests.
        metric: `handler.openvino.quantize.evaluation.metric`.
        f32: The model in f32.
        classifies: Whether outputs [items, classes] are known to be scores of classes.

    Attributes:
        metric: What is measured.
        items: How many requests are compared.
        reference: How the model in f32 did.

    Raises:
        PackagingError: The metric needs classes that are not given, or outputs that the model does not have.
    """

    def __init__(self, samples: Samples, metric: Metric, f32: Run, *, classifies: bool = False) -> None:
        self._samples = samples.items
        self.items = len(samples)
        self._outputs, seconds = _answers(f32, self._samples)
        self._labels = [sample.label for sample in self._samples]
        first = self._outputs[0][0]
        classes = first.dim() == 2 and first.shape[1] > 1 and first.is_floating_point()
        self.metric = _metric(metric, labeled=None not in self._labels, classes=classes, sure=classifies)
        self.reference = Score(self._value(self._outputs), seconds)

    def score(self, run: Run) -> Score:
        """Returns how a model does."""
        outputs, seconds = _answers(run, self._samples)
        return Score(self._value(outputs), seconds)

    def distance(self, run: Run, most: int) -> float:
        """Returns the mean squared difference to f32, over the first requests, relative to the outputs' own squares."""
        answers = _answers(run, self._samples[:most], timed=False)[0]
        pairs = [
            pair
            for ours, theirs in zip(answers, self._outputs, strict=False)
            for pair in zip(ours, theirs, strict=True)
        ]
        floats = [(a.double(), b.double()) for a, b in pairs if b.is_floating_point()]
        scale = sum(float(b.square().sum()) for _, b in floats)
        return sum(float((a - b).square().sum()) for a, b in floats) / max(scale, 1e-30)

    def _value(self, outputs: Sequence[Sequence[Tensor]]) -> float:
        if self.metric == "cosine":
            return statistics.fmean(map(_cosine, outputs, self._outputs))
        # An item may have several rows of classes: tokens, or labels that it is compared with.
        if self.metric == "agreement":
            predicted = [number for output in outputs for number in _classes(output)]
            expected = [number for output in self._outputs for number in _classes(output)]
        else:
            rows = [_classes(output) for output in outputs]
            if any(len(row) != 1 for row in rows):
                raise PackagingError("evaluation.labels has a class for each request, and the model gives it several.")
            predicted = [number for row in rows for number in row]
            expected = [label for label in self._labels if label is not None]
        if self.metric == "f1":
            return _macro_f1(predicted, expected)
        return statistics.fmean(float(a == b) for a, b in zip(predicted, expected, strict=True))


def _metric(metric: Metric, *, labeled: bool, classes: bool, sure: bool) -> Measure:
    if metric == "auto":
        # Vectors have the same shape as scores.
        metric = "top1" if labeled else "agreement" if classes and sure else "cosine"
    if metric in {"top1", "f1"} and not labeled:
        raise PackagingError(f"quantize.evaluation.metric: {metric} needs quantize.evaluation.labels.")
    if metric in {"top1", "f1", "agreement"} and not classes:
        raise PackagingError(
            f"quantize.evaluation.metric: {metric} needs a model whose first output is [items, classes]; use cosine."
        )
    return metric


def _answers(run: Run, samples: Sequence[CalibrationSample], *, timed: bool = True) -> tuple[list[list[Tensor]], float]:
    """Returns the output tensors for each request, and the median time."""
    outputs, times = [], []
    with torch.no_grad():
        for sample in distinct_shapes(samples) if timed else ():
            # Compiles, and allocates.
            args, kwargs = sample.inputs
            run(*args, **kwargs)
        for sample in samples:
            args, kwargs = sample.inputs
            start = time.perf_counter()
            output = run(*args, **kwargs)
            times.append(time.perf_counter() - start)
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if not leaves:
                raise PackagingError("the model returns no tensors, so that its accuracy can't be measured.")
            outputs.append([leaf.detach().clone() for leaf in leaves])
    return outputs, statistics.median(times)


def _classes(outputs: Sequence[Tensor]) -> list[int]:
    """Returns the class of each row of an item's first output."""
    return [int(number) for number in outputs[0].argmax(-1).flatten().tolist()]


def _cosine(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    a, b = (
        torch.cat([tensor.double().flatten() for tensor in some if tensor.is_floating_point()])
        for some in (ours, theirs)
    )
    if a.shape != b.shape:
        return -1.0
    # Masks are -inf.
    known = b.isfinite()
    if b.numel() and not bool(known.any()):
        raise PackagingError("the model in f32 returns no finite number, so that its accuracy can't be measured.")
    if not torch.equal(a[~known].nan_to_num(0.5), b[~known].nan_to_num(0.5)) or not bool(a[known].isfinite().all()):
        return -1.0
    a, b = a[known], b[known]
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else float(torch.equal(a, b))


def _macro_f1(predicted: Sequence[int], expected: Sequence[int]) -> float:
    """Returns the mean of the F1 of all classes that are wanted or found: ``2 right / (wanted + found)``."""
    scores = []
    for label in {*predicted, *expected}:
        right = sum(a == b == label for a, b in zip(predicted, expected, strict=True))
        scores.append(2 * right / (predicted.count(label) + expected.count(label)))
    return statistics.fmean(scores)
