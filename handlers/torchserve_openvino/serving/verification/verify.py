"""Compares the compiled model's answers with eager PyTorch's, output by output."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import output_tensors, relative_tolerance, too_far, widened
from torchserve_openvino.config.sections.handler import VerifySection
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.value_sets import ValueSet
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification.measures import CaseTimes, Measure

# --- checks whether a difference from eager PyTorch is mere rounding, by running eager in another precision -------
# Where an input is constant, normalisation subtracts nearly equal numbers and divides the remainder by almost zero: the
# answer then consists of rounding errors, eager's as much as OpenVINO's, and no tolerance fits it.


# The dtype in which eager shows the rounding of a precision: a wider one for f32, the precision itself otherwise.
_OTHER = {"f32": torch.float64, "bf16x3": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
# How many times eager's rounding error the difference may be: both answers have errors, and different ones.
_FACTOR = 8.0
# Products in bf16x3 have 16 bits of mantissa, those of eager 24.
_COARSER = {"bf16x3": 2.0**8}


def is_rounding(
    eager: Callable[..., Any],
    inputs: Inputs,
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    precision: str,
) -> bool:
    """Checks whether a difference is no larger than the effect of rounding on eager at the same values.

    NaN or infinity at another place, another shape or dtype are never rounding. The weights are copied temporarily.
    """
    other = _run_in(eager, inputs, precision)
    if other is None or not len(got) == len(expected) == len(other):
        return False
    factor = _FACTOR * _COARSER.get(precision, 1.0)
    return all(_within(a, b, c, factor) for a, b, c in zip(got, expected, other, strict=True))


def _within(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, factor: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or b.shape != c.shape:
        return False
    x, y, z = widened(a), widened(b), widened(c)
    if not torch.equal(x.isfinite(), y.isfinite()) or not torch.equal(
        x[~x.isfinite()].isnan(), y[~y.isfinite()].isnan()
    ):
        return False
    moved = (z - y)[y.isfinite() & z.isfinite()].abs()
    differs = (x - y)[y.isfinite()].abs()
    if not differs.numel():
        return True
    return bool(moved.numel()) and float(differs.max()) <= factor * float(moved.max())


def _run_in(eager: Callable[..., Any], inputs: Inputs, precision: str) -> list[torch.Tensor] | None:
    """Returns eager's answer in another precision; None where the model does not run in it."""
    kind = _OTHER.get(precision)
    if kind is None or not isinstance(eager, torch.nn.Module):
        return None

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(kind) if tensor.is_floating_point() else tensor

    weights = {name: cast(t.detach()) for name, t in (*eager.named_parameters(), *eager.named_buffers())}
    args, kwargs = pytree.tree_map_only(torch.Tensor, cast, inputs)
    try:
        with torch.inference_mode():
            return output_tensors(torch.func.functional_call(eager, weights, args, kwargs))
    except Exception as error:
        # A model may hard-code its dtypes, and then does not run in others.
        logger.info("Verification: eager does not run in %s: %s", kind, error)
        return None


# --- compares the compiled model's answers with eager PyTorch's, output by output ---------------------------------


logger = logging.getLogger(__name__)

WORST = {"max_abs": max, "max_rel": max, "cosine": min, "top1_agreement": min}
_SHOWN = 20


def compare(
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    cases: Sequence[Case],
    *,
    precision: str,
    section: VerifySection,
    measure: Measure | None = None,
    times: dict[str, CaseTimes] | None = None,
) -> dict[str, Any]:
    """Compares both models on each case, on values that it was not compiled with; output memory is poisoned before.

    Args:
        precision: The device's inference precision; decides the tolerance where ``section.max_abs`` is None.
        section: Tolerances.
        measure: What the outputs must meet beside the tolerance; None if nothing.
        times: Gets the times of each case, by its name.

    Returns:
        JSON-safe: ``passed``, ``cases``, ``tolerance``, ``problems``; the worst ``max_abs``, ``max_rel``, ``cosine``
        and ``top1_agreement`` (None where no output has classes); ``outputs`` with these four for each output; and
        ``value_sets``: how many were ``compared``, of which ``kinds``, how many were ``skipped`` and why, and whether
        every case was compared on ``unseen`` values, which its compilation did not see. ``measure`` has the name and
        the bound of the measure, where there is one.
    """
    found = _Comparison(compiled, eager, precision, section, measure)
    for position, case in enumerate(cases, 1):
        begin_step("verifying shape", position, len(cases))
        found.run(case)
    if times is not None:
        times.update(found.times)
    tolerance = f"{relative_tolerance(precision):g} of the largest value ({precision})"
    return {
        "passed": not found.problems,
        "against": "eager",
        "cases": len(cases),
        "value_sets": {
            "compared": found.kinds.total(),
            "kinds": dict(found.kinds),
            "skipped": len(found.skipped),
            "why_skipped": found.skipped[:_SHOWN],
            "unseen": found.unseen,
        },
        "tolerance": f"max_abs {section.max_abs:g}" if section.max_abs is not None else tolerance,
        **{name: _worst(name, [output.get(name) for output in found.outputs]) for name in WORST},
        **({"measure": measure.described()} if measure is not None else {}),
        "outputs": found.outputs,
        "problems": found.problems[:_SHOWN],
    }


class _Comparison:
    """Runs the comparisons of all cases and collects their results."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        precision: str,
        section: VerifySection,
        measure: Measure | None,
    ) -> None:
        self._compiled, self._eager = compiled, eager
        self._precision, self._section, self._measure = precision, section, measure
        self._poisoned = getattr(compiled, "poisoned", nullcontext)
        self.outputs: list[dict[str, float | None]] = []
        self.problems: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.skipped: list[str] = []
        self.unseen = True
        self.times: dict[str, CaseTimes] = {}

    def run(self, case: Case) -> None:
        """Compares one case on its other values, or on its own where none of those can be compared."""
        sets = case.others() if case.others is not None else ()
        with case.modes.on():
            compared = [self._one(case.name, values) for values in sets]
            if not any(compared):
                self.unseen = False
                self._one(case.name, ValueSet("as recorded", case.inputs), required=True)

    def _one(self, case: str, values: ValueSet, required: bool = False) -> bool:
        """Compares a set of values unless it must be skipped, which ``required`` forbids; returns whether it did."""
        name = f"{case}, {values.name}"
        args, kwargs = values.inputs
        start = time.perf_counter()
        try:
            expected = [tensor.detach() for tensor in output_tensors(self._eager(*args, **kwargs))]
        except Exception as error:
            if required:
                raise
            return self._skip(name, f"eager raises {class_and_line(error)}")
        middle = time.perf_counter()
        if reason := "" if required else _says_nothing(expected, values):
            return self._skip(name, reason)
        begin = time.perf_counter()
        try:
            with self._poisoned():
                got = [tensor.detach() for tensor in output_tensors(self._compiled(*args, **kwargs))]
        except Exception as error:
            if required:
                raise
            self.problems.append(f"{name}: raises {class_and_line(error)}")
            return True
        seconds = CaseTimes(middle - start, time.perf_counter() - begin)
        self.times[case] = self.times.get(case, seconds).merged(seconds)
        outputs: list[dict[str, float | None]] = []
        problems = judge(got, expected, self._precision, self._section, outputs, self._measure)
        if problems and values.constant and is_rounding(self._eager, values.inputs, got, expected, self._precision):
            return self._skip(name, "rounding alone changes eager's answer as much")
        self.kinds[values.name] += 1
        self.problems += [f"{name}{text}" for text in problems]
        for index, figures in enumerate(outputs):
            if index == len(self.outputs):
                self.outputs.append({})
            for figure, value in figures.items():
                self.outputs[index][figure] = _worst(figure, [self.outputs[index].get(figure), value])
        return True

    def _skip(self, name: str, reason: str) -> bool:
        logger.info("Verification: %s is skipped: %s", name, reason)
        self.skipped.append(f"{name}: {reason}")
        return False


def judge(
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    precision: str,
    section: VerifySection,
    outputs: list[dict[str, float | None]],
    measure: Measure | None = None,
) -> list[str]:
    """Returns what is wrong with an answer, as texts to append to its name.

    Args:
        got: The answer's tensors.
        expected: Those of eager's answer.
        precision: The device's inference precision.
        section: Tolerances.
        outputs: The figures of each output are appended here.
        measure: What the outputs must meet beside the tolerances.
    """
    if len(got) != len(expected):
        return [f": {len(got)} outputs instead of {len(expected)}"]
    problems = []
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        outputs.append({})
        wrong = _difference(a, b, precision, section, outputs[index])
        problems += [f", output {index}: {text}" for text in wrong]
    return problems + (measure.problems(got, expected) if measure is not None else [])


def _says_nothing(expected: Sequence[torch.Tensor], values: ValueSet) -> str:
    """Returns why eager's answer to some values can't serve as a reference; empty where it can."""
    numbers = [t for t in expected if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if values.needs_finite and any(bool(t.isnan().any()) for t in numbers):
        return "eager answers NaN"
    if numbers and len(numbers) == len(expected) and all(bool(t.isnan().all()) for t in numbers):
        return "eager answers NaN everywhere"
    return ""


def _difference(
    a: torch.Tensor, b: torch.Tensor, precision: str, section: VerifySection, worst: dict[str, float | None]
) -> list[str]:
    """Returns what is wrong with one output, and merges its figures into ``worst``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}"]
    figures = _figures(widened(a), widened(b))
    for name, value in figures.items():
        worst[name] = _worst(name, [worst.get(name), value])
    found = []
    if not torch.equal(a.isnan(), b.isnan()):
        found.append("has NaN at different positions")
    if far := too_far(a, b, precision, section.max_abs, figures["max_abs"]):
        found.append(far)
    if section.min_cosine is not None and figures["cosine"] < section.min_cosine:
        found.append(f"has cosine {figures['cosine']:.6f}, less than min_cosine {section.min_cosine:g}")
    top1 = figures["top1_agreement"]
    if section.min_top1 is not None and top1 is not None and top1 < section.min_top1:
        found.append(f"agrees in {top1:.1%} of the largest values, less than min_top1 {section.min_top1:.1%}")
    return found


def _worst(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return WORST[name](known) if known else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(_flat(tensor), 0.0, 0.0, 0.0)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


def _figures(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    difference = (a - b).abs()
    # The largest difference is NaN or infinite if any is; a large answer is then not searched for them again.
    finite = bool(difference.numel()) and math.isfinite(float(difference.max()))
    if not finite:
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, difference)
    relative = difference / b.abs().clamp_min(1e-6)
    x, y = (_flat(a), _flat(b)) if finite else (_finite(a), _finite(b))
    norm = float(x.norm() * y.norm())
    top1 = None
    if a.dim() >= 2 and a.shape[-1] > 1 and a.numel() and not a.is_complex():
        top1 = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return {
        "max_abs": _largest(difference) if finite or bool(difference.isfinite().all()) else float("inf"),
        "max_rel": _largest(relative) if finite else _largest(_finite(relative)),
        "cosine": float(x @ y) / norm if norm else 1.0,
        "top1_agreement": top1,
    }


def failure(result: dict[str, Any]) -> str:
    """Describes a failed comparison, and what the user can do about it."""
    return (
        f"answers differ from eager PyTorch: {'; '.join(result['problems'][:3])} (max abs {result['max_abs']}, cosine "
        f"{result['cosine']}; tolerance {result['tolerance']}). Set another INFERENCE_PRECISION_HINT, a larger "
        "handler.openvino.verify.max_abs, find the operator with disabled_ops, or set on_violation: warn."
    )
