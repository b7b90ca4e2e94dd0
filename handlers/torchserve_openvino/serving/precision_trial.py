"""Tries precisions for ``precision: auto``: compiles a few shapes in each, verifies them, times them against f32."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.config.openvino.precisions import BF16X3
from torchserve_openvino.serving import precision
from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.shapes.warmup import Case, run_case

logger = logging.getLogger(__name__)

# Time limit for all candidates together, from the moment when f32 is compiled and verified.
BUDGET_SECONDS = 20.0
# A model that takes long to compile in f32 gets so many times that time, so that one candidate is tried.
TIMES_F32 = 1.5
# Longest call of a trial in eager PyTorch: a trial makes some 30 calls of each shape.
CALL_SECONDS = 0.2
# Sets of values that a trial verifies each of its shapes on.
VALUE_SETS = 2


@dataclass(frozen=True)
class PrecisionCandidate:
    """A precision to try.

    Attributes:
        name: ``f32``, ``bf16``, ``bf16x3``, ``f16`` or ``int8``.
        compile: Compiles the model for some cases, without the cache.
        compare: Returns the result of `verify.compare` for these cases.
    """

    name: str
    compile: Callable[[Sequence[Case]], Prepared]
    compare: Callable[[Prepared, Sequence[Case]], dict[str, Any]]


def representatives(cases: Sequence[Case], eager_seconds: Callable[[Case], float]) -> list[Case]:
    """Returns the cases that a trial runs: the smallest, the largest, and the largest of a single item.

    Kernels change with the size, so that a gain at one end may be a loss at the other. The largest is the largest one
    that eager PyTorch computes within `CALL_SECONDS`: beyond, only the number of the same operations grows. Samples
    are used only where no inputs are declared, since a sample may be padded to a shape that the trial has not compiled.

    Args:
        cases: Every case of the model.
        eager_seconds: Returns how long a case takes in eager PyTorch.
    """
    ordered = sorted([case for case in cases if case.compiled_shape] or cases, key=_numbers)
    affordable, measured = ordered[:1], _numbers(ordered[0])
    for case in ordered[1:]:
        # A case of less than twice the size of the last measured one is not measured.
        if _numbers(case) >= 2 * measured or case is ordered[-1]:
            measured = _numbers(case)
            # The faster of two calls, since a first call is not typical.
            if min(eager_seconds(case), eager_seconds(case)) > CALL_SECONDS:
                break
        affordable.append(case)
    singles = [case for case in affordable if _rows(case) == 1]
    chosen = [*affordable[:1], *singles[-1:], *affordable[-1:]]
    return list({id(case): _briefly_verified(case) for case in chosen}.values())


def _briefly_verified(case: Case) -> Case:
    """Returns the case with `VALUE_SETS` sets of values: the chosen precision is verified on all of them."""
    others = case.others
    return case if others is None else replace(case, others=lambda: others()[:VALUE_SETS])


def run(
    candidates: Sequence[PrecisionCandidate],
    cases: Sequence[Case],
    eager_seconds: Callable[[Case], float],
    *,
    is_alone: bool = True,
) -> dict[str, Any]:
    """Tries each candidate within one time limit; returns `precision.explain`'s facts.

    Args:
        candidates: f32 first, then the others in the order in which they are tried.
        cases: Every case of the model; `representatives` of them are run.
        eager_seconds: Returns how long a case takes in eager PyTorch.
        is_alone: Whether this process serves no other model: `torch.compiler.reset` drops that, too.
    """
    start = time.perf_counter()
    timed = representatives(cases, eager_seconds)
    compiling = time.perf_counter()
    needless: dict[str, str] = {}
    too_late: dict[str, str] = {}
    with _compiled(candidates[0], timed) as (base, right):
        trials = [precision.TimedPrecision(candidates[0].name, right, coverage=base.report.summary.coverage)]
        is_whole = _is_whole(base)
        # A candidate takes at most about as long as f32 to compile and verify, and the next about as long as the last.
        cost = time.perf_counter() - compiling
        limit = max(BUDGET_SECONDS, TIMES_F32 * cost)
        deadline = time.perf_counter() + limit
        for candidate in candidates[1:]:
            begin = time.perf_counter()
            if candidate.name == BF16X3 and "bf16" in precision.ranking(trials):
                needless[candidate.name] = "bf16 is right and faster: it computes one product where this needs three"
                continue
            if deadline - begin < cost:
                why = f"compiling and verifying takes about {cost:.1f} s"
                too_late[candidate.name] = _no_time(deadline, limit, why)
                continue
            with _compiled(candidate, timed) as (prepared, result):
                cost = time.perf_counter() - begin
                trial = precision.TimedPrecision(candidate.name, result, coverage=prepared.report.summary.coverage)
                if result["passed"]:
                    left = deadline - time.perf_counter()
                    pairs = precision.timed_pairs(_calls(base, timed), _calls(prepared, timed), left)
                    if len(pairs) < precision.LEAST_PAIRS:
                        why = f"it was timed {len(pairs)} time(s), and {precision.LEAST_PAIRS} are needed"
                        too_late[candidate.name] = _no_time(deadline, limit, why)
                        continue
                    gain, sure = statistics.median(pairs), precision.sure_median(pairs)
                    trial = replace(trial, gain=gain, sure_gain=sure, pairs=len(pairs))
                trials.append(trial)
    if is_alone and not is_whole:
        # Nothing that was captured is used again; Dynamo would keep it, and remember which sizes it saw.
        torch.compiler.reset()
    for name, why in too_late.items():
        logger.warning("Precision %s is not tried: %s", name, why)
    return precision.explain(
        trials, not_tried={**needless, **too_late}, cases=[case.name for case in timed],
        seconds=time.perf_counter() - start,
    )  # fmt: skip


@contextmanager
def _compiled(candidate: PrecisionCandidate, cases: Sequence[Case]) -> Iterator[tuple[Prepared, dict[str, Any]]]:
    """Compiles and verifies a precision, for the context: afterwards, only the chosen precision may take memory."""
    logger.info("Precision %s: compiling, verifying, timing", candidate.name)
    prepared = candidate.compile(cases)
    try:
        yield prepared, candidate.compare(prepared, cases)
    finally:
        if isinstance(prepared.model.compiled, CompiledModule):
            prepared.model.compiled.drop()


def _is_whole(prepared: Prepared) -> bool:
    """Whether every call was captured as one graph, which further precisions then compile without tracing it again."""
    compiled = prepared.model.compiled
    return isinstance(compiled, CompiledModule) and bool(compiled.frozen) and not compiled.guarded_reasons


def _no_time(deadline: float, limit: float, why: str) -> str:
    left = deadline - time.perf_counter()
    return (
        f"{max(left, 0.0):.1f} s of the {limit:.3g} s for trials are left: {why}. Set {precision.KEY} to this "
        "precision to serve it without a trial"
    )


def _calls(prepared: Prepared, cases: Sequence[Case]) -> Callable[[], object]:
    """Returns a function that calls the model once with each case."""
    return lambda: [run_case(prepared.model.compiled, prepared.model, case) for case in cases]


def _numbers(case: Case) -> int:
    """Returns how many numbers a case's inputs have."""
    return sum(tensor.numel() for tensor in output_tensors(case.inputs))


def _rows(case: Case) -> int:
    """Returns the batch size of a case: the first dimension of its inputs."""
    return max((tensor.shape[0] for tensor in output_tensors(case.inputs) if tensor.dim()), default=0)
