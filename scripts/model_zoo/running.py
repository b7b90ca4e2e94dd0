"""Runs one case: eager PyTorch and compiled side by side, on two sets of values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import torchserve_openvino as tov
from model_zoo.building import NotBuiltError, Subject, build
from model_zoo.catalog import Architecture
from model_zoo.compare import Difference, difference, tensors
from model_zoo.grid import LENGTHS, Case, distinct
from model_zoo.outcome import Outcome
from model_zoo.overrides import LONGEST, STATIC

# By precision: the difference that is always allowed, relative to the largest value of an output; orders of summation
# differ, and bfloat16 rounds to 8 bits at each operator.
_TOLERANCE = {"f32": 2e-4, "bf16": 0.06}
# Where the difference is larger, weights are disturbed by this much in eager PyTorch, and the answers may differ by so
# many times what that changes: a router's choice between experts that are nearly alike, for example.
_NOISE = {"f32": 1e-6, "bf16": 4e-3}
_TIMES_NOISE = {"f32": 10.0, "bf16": 2.0}
_NOISE_RUNS = 3
_GARBAGE = (float("nan"), 1e20)

Call = Callable[..., Any]


def run(architecture: Architecture, chosen: list[Case], number: int, properties: Mapping[str, Any]) -> Outcome:
    """Runs one of the chosen cases; skips it if it equals an earlier one for this architecture.

    Args:
        architecture: What to build.
        chosen: All cases.
        number: Which of them.
        properties: Of OpenVINO, for this run.
    """
    longest = LONGEST.get(architecture.name, max(LENGTHS))
    chosen = [dataclasses.replace(case, length=min(case.length, longest)) for case in chosen]
    case = chosen[number]
    if case.dynamic and architecture.name in STATIC:
        return Outcome("skipped", "torch alone takes minutes to trace it with symbolic sizes")
    torch._dynamo.reset()
    try:
        subject = build(architecture, case)
    except NotBuiltError as error:
        return Outcome("not built", str(error))
    if case not in distinct(chosen[: number + 1], subject.axes):
        return Outcome("skipped", kind=subject.kind)
    with torch.no_grad():
        return _compare(subject, case, properties)


def _compare(subject: Subject, case: Case, properties: Mapping[str, Any]) -> Outcome:
    outcome = Outcome("right", kind=subject.kind)
    try:
        expected = _calls(subject, subject.model, case)
    except Exception as error:
        return Outcome("not built", f"eager: {_line(error)}", kind=subject.kind)
    config = {"INFERENCE_PRECISION_HINT": case.precision, "INFERENCE_NUM_THREADS": case.threads, **properties}
    options = {"min_partition_us": 0, "config": config}
    compiled = tov.compile(subject.model, dynamic=case.dynamic, options=options)
    try:
        _litter(expected)
        answers = _calls(subject, compiled, case, dirty=True)
    except Exception as error:
        outcome.verdict, outcome.detail = "ERROR", _line(error)
        if _fails_without_openvino(subject, case):
            outcome.verdict = "upstream"
        return outcome
    outcome.add_report(compiled.report)
    result = difference(answers, expected, case.precision == "bf16")
    outcome.difference = result.largest
    if result.largest > _limit(subject, case, expected, result):
        outcome.verdict, outcome.detail = "WRONG", result.detail
        if case.precision == "f32" and _same_without_openvino(subject, case, expected, result):
            outcome.verdict = "upstream"
    return outcome


def _limit(subject: Subject, case: Case, expected: Any, result: Difference) -> float:
    """The difference that is allowed; more is computed only where the simple bound does not do."""
    limit = _TOLERANCE[case.precision]
    if result.largest <= limit or result.largest == float("inf"):
        return limit
    for seed in range(_NOISE_RUNS):
        disturbed = _calls(subject, _disturbed(subject.model, _NOISE[case.precision], seed), case)
        limit = max(limit, _TIMES_NOISE[case.precision] * _finite(difference(disturbed, expected)))
    if case.precision == "bf16":
        with _Rounded():
            rounded = _calls(subject, subject.model, case)
        limit = max(limit, _TIMES_NOISE["bf16"] * _finite(difference(rounded, expected, True)))
    return limit


class _Rounded(TorchDispatchMode):
    """Rounds each result to bfloat16, as OpenVINO does: angles, and what else an operator can't be wrong in."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        # What an operator writes to, or returns a view of, is the caller's.
        if any(argument.alias_info is not None for argument in op._schema.arguments):
            return result
        return tree_map_only(torch.Tensor, _to_bfloat16, result)


def _to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float() if value.dtype is torch.float32 else value


def _disturbed(model: torch.nn.Module, noise: float, seed: int) -> torch.nn.Module:
    disturbed, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in disturbed.parameters():
        if parameter.is_floating_point():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    return disturbed


def _finite(result: Difference) -> float:
    return result.largest if result.largest < float("inf") else 0.0


def _calls(subject: Subject, call: Call, case: Case, dirty: bool = False) -> list[Any]:
    """Two calls with different values, each followed by one with another token and the cache."""
    answers = []
    for number in (0, 1):
        # Other random numbers would be another answer.
        torch.manual_seed(number)
        with call.poisoned() if isinstance(call, tov.CompiledModule) else contextlib.nullcontext():
            answers += list(_call(subject, call, case, number))
        if dirty:
            _litter(answers)
    return answers


def _call(subject: Subject, call: Call, case: Case, number: int) -> Iterator[Any]:
    inputs = subject.draw(number, bool(number) and case.dynamic)
    if not subject.cache_name:
        yield _copied(call(**inputs))
        return
    first = call(**inputs, use_cache=case.cache)
    yield _copied(first)
    cache = getattr(first, subject.cache_name, None)
    if not case.cache or cache is None:
        return
    following = dict(inputs)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    following[name] = inputs[name][:, -1:].flip(0)
    if name == "input_ids" and "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        following["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    if getattr(first, "encoder_last_hidden_state", None) is not None and "encoder_outputs" in subject.names:
        from transformers.modeling_outputs import BaseModelOutput

        following = {key: value for key, value in following.items() if key in {name, "attention_mask"}}
        following["encoder_outputs"] = BaseModelOutput(last_hidden_state=first.encoder_last_hidden_state)
    yield _copied(call(**following, use_cache=True, **{subject.cache_name: cache}))


def _copied(answer: Any) -> dict[str, torch.Tensor]:
    """Copies what an answer holds now: a cache changes with the next call."""
    return {name: value.detach().clone() for name, value in tensors(answer)}


def _litter(answers: Any) -> None:
    """Leaves garbage in free memory, in blocks of the sizes of an answer's tensors."""
    sizes = {value.nbytes for _, value in tensors(answers)}
    for garbage in _GARBAGE:
        kept = [torch.full((max(1, size // 4),), garbage) for size in sizes for _ in range(4)]
        del kept


def _without_openvino(subject: Subject, case: Case) -> list[Any]:
    torch._dynamo.reset()
    traced = torch.compile(subject.model, backend="aot_eager", dynamic=case.dynamic)
    return _calls(subject, traced, case)


def _fails_without_openvino(subject: Subject, case: Case) -> bool:
    try:
        _without_openvino(subject, case)
    except Exception:
        return True
    return False


def _same_without_openvino(subject: Subject, case: Case, expected: Any, result: Difference) -> bool:
    try:
        theirs = difference(_without_openvino(subject, case), expected)
    except Exception:
        return False
    return theirs.largest >= result.largest / 2


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
