"""Compares the compiled model's answers with eager PyTorch's, output by output."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import StateKeeper, same_random_numbers
from torchserve_openvino.backend.runtime.compare import comparable, copied, widened
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.shapes.value_sets import ValueSet
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.verification.judge import WORST, Judge, worst_of
from torchserve_openvino.serving.verification.measures import CaseTimes

# --- checks whether a difference from eager PyTorch is mere rounding, by running eager in another precision -------
# Where an input is constant, normalization subtracts nearly equal numbers and divides the remainder by almost zero: the
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
            return comparable(torch.func.functional_call(eager, weights, args, kwargs))
    except Exception as error:
        # A model may hard-code its dtypes, and then does not run in others.
        logger.info("Verification: eager does not run in %s: %s", kind, error)
        return None


# --- compares the compiled model's answers with eager PyTorch's, output by output ---------------------------------


logger = logging.getLogger(__name__)

_SHOWN = 20
NOTHING = "eager's answer holds no tensors, numbers or texts to compare"
# What is kept of answers, at most.
_KEPT_BYTES = 1 << 26


class Run(NamedTuple):
    """One run of a model.

    Attributes:
        tensors: What can be compared of its answer.
        seconds: How long it took.
        keeps_state: Whether it changed the model's state.
    """

    tensors: list[torch.Tensor]
    seconds: float
    keeps_state: bool


def run_alike(model: Callable[..., Any], values: ValueSet, state: StateKeeper | None) -> Run:
    """Runs a model on values and random numbers of its own: what one run changes, another one does not see.

    Args:
        model: The model in PyTorch, or compiled.
        values: The values.
        state: The state that the model is put back to; None if it keeps none.
    """
    args, kwargs = copied(values.inputs)
    keeps_state = True
    try:
        with same_random_numbers():
            start = time.perf_counter()
            tensors = [tensor.detach() for tensor in comparable(model(*args, **kwargs))]
            seconds = time.perf_counter() - start
        keeps_state = state is not None and bool(state.changed())
        # An answer may be part of the state.
        return Run([tensor.clone() for tensor in tensors] if keeps_state else tensors, seconds, keeps_state)
    finally:
        if state is not None and keeps_state:
            state.restore()


class EagerAnswers:
    """Eager PyTorch's answers to sets of values, computed once for all precisions that are compared with them.

    Args:
        eager: The model in PyTorch.
        most_bytes: Answers beyond this size are computed again each time.
    """

    def __init__(self, eager: Callable[..., Any], most_bytes: int = _KEPT_BYTES) -> None:
        self._eager = eager
        self._free = most_bytes
        # By the inputs of the case, which are kept, too: one sample may make several calls, all of its name.
        self._kept: dict[tuple[int, str], tuple[Inputs, list[torch.Tensor], float]] = {}

    def snapshot(self) -> StateKeeper:
        """Returns the model's state as it is now."""
        return StateKeeper(self._eager, contents=True)

    def of(self, case: Case, values: ValueSet, state: StateKeeper | None) -> Run:
        """Returns the answer.

        Args:
            case: The call.
            values: Its values; a case makes the same values each time under one name.
            state: See `run_alike`.
        """
        key = id(case.inputs), values.name
        if (stored := self._kept.get(key)) is not None:
            return Run(*stored[1:], keeps_state=False)
        run = run_alike(self._eager, values, state)
        tensors, seconds, _ = run
        size = sum(tensor.nbytes for tensor in tensors)
        if size <= self._free:
            self._free -= size
            # An answer may be part of the model, or of its inputs, which later calls may change.
            self._kept[key] = case.inputs, [tensor.clone() for tensor in tensors], seconds
        return run

    def differ_by_rounding(
        self, values: ValueSet, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], precision: str
    ) -> bool:
        """Checks whether answers differ no more than eager's own do in another precision; see `is_rounding`."""
        return is_rounding(self._eager, values.inputs, got, expected, precision)


def compare(
    compiled: Callable[..., Any],
    eager: EagerAnswers,
    cases: Sequence[Case],
    judge: Judge,
    times: dict[str, CaseTimes] | None = None,
    *,
    poisoned: Callable[[], AbstractContextManager[None]],
) -> dict[str, Any]:
    """Compares both models on each case, on values that it was not compiled with; output memory is poisoned before.

    Args:
        compiled: The compiled model.
        eager: Answers to compare with.
        cases: The calls to compare.
        judge: Judges each answer.
        times: Gets the times of each case, by its name.
        poisoned: Poisons the memory of the compiled model's results while its context lasts.

    Returns:
        JSON-safe: ``passed``, ``cases``, ``tolerance``, ``problems``; the worst ``max_abs``, ``max_rel``, ``cosine``
        and ``top1_agreement`` (None where no output has classes); ``outputs`` with these four for each output; and
        ``value_sets``: how many were ``compared``, of which ``kinds``, how many were ``skipped`` and why, and whether
        every case was compared on ``unseen`` values, which its compilation did not see. ``measure`` has the name and
        the bound of the measure, where there is one, and its ``worst`` figure.
    """
    comparison = _Comparison(compiled, eager, judge, poisoned)
    for position, case in enumerate(cases, 1):
        begin_step("verifying shape", position, len(cases))
        comparison.run(case)
    if times is not None:
        times.update(comparison.times)
    return {
        "passed": not comparison.problems,
        "against": "eager",
        "cases": len(cases),
        "value_sets": {
            "compared": comparison.kinds.total(),
            "kinds": dict(comparison.kinds),
            "skipped": len(comparison.skipped),
            "why_skipped": comparison.skipped[:_SHOWN],
            "unseen": comparison.unseen,
        },
        "tolerance": judge.tolerance,
        **{name: worst_of(name, [output.get(name) for output in comparison.outputs]) for name in WORST},
        **({"measure": measure.described(comparison.measured)} if (measure := judge.measure) is not None else {}),
        "outputs": comparison.outputs,
        "problems": comparison.problems[:_SHOWN],
    }


class _Comparison:
    """Runs the comparisons of all cases and collects their results."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: EagerAnswers,
        judge: Judge,
        poisoned: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._compiled, self._eager, self._judge = compiled, eager, judge
        self._poisoned = poisoned
        self._state = eager.snapshot()
        # Looking at all of a model's state takes longer than a call of a small one: the first call of a case tells.
        self._keeps_state = True
        self.outputs: list[dict[str, float | None]] = []
        self.problems: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.skipped: list[str] = []
        self.unseen = True
        self.measured: float | None = None
        self.times: dict[str, CaseTimes] = {}

    def run(self, case: Case) -> None:
        """Compares one case on its other values, or on its own where none of those can be compared."""
        sets = case.others() if case.others is not None else ()
        self._keeps_state = True
        with case.modes.on():
            compared = [self._one(case, values) for values in sets]
            if not any(compared):
                self.unseen = False
                self._one(case, ValueSet("as recorded", case.inputs), required=True)

    def _one(self, case: Case, values: ValueSet, required: bool = False) -> bool:
        """Compares a set of values unless it must be skipped, which ``required`` forbids; returns whether it did."""
        name = f"{case.name}, {values.name}"
        state = self._state if self._keeps_state else None
        try:
            expected, eager_seconds, keeps_state = self._eager.of(case, values, state)
        except Exception as error:
            if required:
                raise
            return self._skip(name, f"eager raises {class_and_line(error)}")
        if reason := "" if required else _says_nothing(expected, values):
            return self._skip(name, reason)
        if not expected:
            return self._skip(name, NOTHING)
        try:
            with self._poisoned():
                got, took, changes_state = run_alike(self._compiled, values, state)
        except Exception as error:
            if required:
                raise
            self.problems.append(f"{name}: raises {class_and_line(error)}")
            return True
        self._keeps_state = keeps_state or changes_state
        seconds = CaseTimes(eager_seconds, took, took)
        self.times[case.name] = self.times.get(case.name, seconds).merged(seconds)
        verdict, precision = self._judge.judge(got, expected), self._judge.precision
        may_round = bool(verdict.problems) and values.constant
        if may_round and self._eager.differ_by_rounding(values, got, expected, precision):
            return self._skip(name, "rounding alone changes eager's answer as much")
        if self._judge.measure is not None:
            self.measured = self._judge.measure.worse(self.measured, verdict.measured)
        self.kinds[values.name] += 1
        self.problems += [f"{name}{text}" for text in verdict.problems]
        for index, figures in enumerate(verdict.outputs):
            if index == len(self.outputs):
                self.outputs.append({})
            for figure, value in figures.items():
                self.outputs[index][figure] = worst_of(figure, [self.outputs[index].get(figure), value])
        return True

    def _skip(self, name: str, reason: str) -> bool:
        logger.info("Verification: %s is skipped: %s", name, reason)
        self.skipped.append(f"{name}: {reason}")
        return False


def _says_nothing(expected: Sequence[torch.Tensor], values: ValueSet) -> str:
    """Returns why eager's answer to some values can't serve as a reference; empty where it can."""
    numbers = [t for t in expected if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if values.needs_finite and any(bool(t.isnan().any()) for t in numbers):
        return "eager answers NaN"
    if numbers and len(numbers) == len(expected) and all(bool(t.isnan().all()) for t in numbers):
        return "eager answers NaN everywhere"
    return ""


def failure(result: dict[str, Any]) -> str:
    """Describes a failed comparison, and what the user can do about it."""
    return (
        f"answers differ from eager PyTorch: {'; '.join(result['problems'][:3])} (max abs {result['max_abs']}, cosine "
        f"{result['cosine']}; tolerance {result['tolerance']}). Set another INFERENCE_PRECISION_HINT, a larger "
        "handler.openvino.verify.max_abs, find the operator with disabled_ops, or set on_violation: warn."
    )
