"""Runs one program: eager and compiled side by side, call after call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

# Registers operators that programs name.
from torch.ao.quantization.fx import _decomposed  # noqa: F401
from torch.utils import _pytree as pytree

import torchserve_openvino as tov
from fuzzing.context import plain_cond
from fuzzing.judge import MADE_NAN, NOISE_FACTOR, SOFT, difference, errors_of, noise_of
from fuzzing.observe import Observation, observe
from fuzzing.program import Program
from fuzzing.promised import LooksForNaN, exported, promised_strides, traced
from fuzzing.uncounted import Books
from fuzzing.values import arguments
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.spec import OpenAxes

# Relative change of one operator's result by another order of summation, approximation or place of rounding.
_NOISE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# OpenVINO's own exp, tanh and others are this precise; weights and values in bfloat16 have 8 bits.
_REAL_NOISE, _BF16_NOISE = 5e-6, 4e-3
# Disturbances are random and independent; rounding errors are neither.
_REAL_NOISE_FACTOR = {"f32": 4.0, "bf16": 8.0}
_NOISE_RUNS = 3
# What ours may be farther from the result in float64 than eager is.
_MORE_THAN_EAGER = 16.0
# Such blocks of memory are seldom many.
_LARGE = 1 << 18
_GARBAGE = (float("nan"), 1e20)
_OF_VALUES = frozenset({"value", "effect", "grad", "overwritten"})


@dataclass
class Result:
    """The outcome of a program.

    Attributes:
        outcome: ``ok``; ``failed``; ``torch`` if torch's own tracing, without OpenVINO, does the same; ``nan`` if
            eager's values become NaN on the way, which OpenVINO does not propagate everywhere (docs/limits.md);
            ``discarded`` if eager refuses the program.
        kind: Kind of failure.
        detail: What differs.
        step: Position of the call in `Mode.steps`.
        coverage: Share of operators on OpenVINO.
        ops: Operators in the lowered graphs.
    """

    outcome: str
    kind: str = ""
    detail: str = ""
    step: int = -1
    coverage: float = 0.0
    ops: int = 0
    fallbacks: int = 0
    compiled: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


Compile = Callable[[torch.nn.Module], Callable[..., Any]]


class _Side:
    """A module of the program, compiled or eager; runs its calls and observes them."""

    def __init__(
        self, program: Program, compile_: Compile | None, noise: int = -1, wide: bool = False, raised: bool = False
    ) -> None:
        self.program = program
        self.disturbs_inputs = noise >= 0 and program.mode.precision == "bf16"
        self.wide, self.raised = wide, raised
        self.module = module_of(program, noise, compiled=compile_ is not None, wide=wide)
        if wide:
            self.module.double()
        self.call: Callable[..., Any] = compile_(self.module) if compile_ else self.module
        self.books = Books(self.call)
        # The next call must not change the last answer and its inputs.
        self.earlier: list[torch.Tensor] = []
        if noise >= 0:
            torch.manual_seed(noise)

    def step(self, letter: str) -> Observation | None:
        mode = self.program.mode
        if letter == "W":
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(0.5).add_(0.125)
            self.books.forget()
            return None
        with_grad = mode.grad == "grad"
        inputs = self._changed(arguments(self.program, letter, with_grad))
        try:
            with (
                torch.inference_mode(mode.grad == "inference_mode"),
                torch.set_grad_enabled(with_grad),
                _poisoned(self.call),
                self.books.look_at(letter in "AB"),
            ):
                answer = self.call(*inputs)
            names = [spec.name for spec in self.program.inputs]
            seen = observe(answer, self.module, names, inputs, with_grad)
            seen.tensors |= {f"earlier {i}": t.detach().clone() for i, t in enumerate(self.earlier)}
            answered = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
            self.earlier = [*answered, *inputs]
            return seen
        except Exception as error:
            return Observation(error=f"{type(error).__name__}: {_plain(str(error))}")

    def _changed(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs, disturbed, all raised by their last digit, or in float64."""
        if not (self.wide or self.raised or self.disturbs_inputs):
            return inputs
        for position, tensor in enumerate(inputs):
            if tensor.is_floating_point():
                value = tensor.detach()
                if self.wide:
                    value = value.double()
                elif self.raised:
                    value = value + value.abs() * torch.finfo(value.dtype).eps
                else:
                    value = _disturber(self.program)(value)
                inputs[position] = value.requires_grad_(tensor.requires_grad)
        return inputs


def run(program: Program, strict: bool = False) -> Result:
    """Compares the program's calls with eager."""
    result = _compared(program, lambda module: compiled(program, module), strict)
    if result.outcome == "failed" and result.kind != "uncounted":
        for way in _ways(program):
            theirs = _torchs_own(program, strict, way)
            if theirs.outcome == "failed" and (theirs.kind, theirs.step) == (result.kind, result.step):
                result.outcome = "torch"
                break
    if (result.outcome, result.kind) == ("failed", "no_error") and _needless(program, result.step, strict):
        # Eager's error comes from a computation that no output needs; torch.compile leaves it out.
        result.outcome = "torch"
    lost = result.outcome == "failed" and result.kind in _OF_VALUES and MADE_NAN not in result.detail
    if lost and _becomes_nan(program, result.step):
        result.outcome = "nan"
    return result


def _becomes_nan(program: Program, step: int) -> bool:
    """Whether an operator returns NaN in one step of the eager run."""
    side = _Side(program, None)
    for letter in program.mode.steps[:step]:
        side.step(letter)
    with LooksForNaN() as mode:
        side.step(program.mode.steps[step])
    return mode.found


def _needless(program: Program, step: int, strict: bool) -> bool:
    """Whether eager's error comes only from dead code, including values used for their shape only (``empty_like``)."""
    if _answers(program.living(), step):
        return True
    without_writes = program.living(writes=False)
    if _same_until(without_writes, program, step) and _answers(without_writes, step):
        return True
    # What torch alone shows in earlier steps (such as gradients of zeros) does not matter here.
    with torch._dynamo.config.patch(allow_rnn=True):
        return _answers(program, step, lambda module: _traced(program, module, "decomposed"))


def _same_until(one: Program, other: Program, step: int) -> bool:
    """Whether two programs show the same in eager PyTorch, before a step."""
    sides = _Side(one, None), _Side(other, None)
    for letter in other.mode.steps[:step]:
        mine, theirs = (side.step(letter) for side in sides)
        if mine is not None and theirs is not None and any(difference(mine, theirs, {})):
            return False
    return True


def _ways(program: Program) -> list[str]:
    """Ways in which torch alone may show the same difference."""
    # With gradients, a recurrent layer breaks the graph in this package.
    parted = ["parted"] if program.mode.grad == "grad" else []
    laid_out = ["laid_out"] if program.mode.open == "ones" else []
    return ["traced", *parted, *laid_out, *(["exported"] if program.mode.backend == "export" else [])]


def _torchs_own(program: Program, strict: bool, way: str) -> Result:
    """Compares torch's own tracing, without OpenVINO, with eager.

    Args:
        program: The program to run.
        strict: As in `difference`.
        way: ``traced``: Dynamo and AOTAutograd; ``parted``: with recurrent layers between graphs; ``decomposed``:
            without dead code; ``laid_out``: in the memory order that was traced; ``exported``: torch.export.
    """

    def compile_(module: torch.nn.Module) -> Callable[..., Any]:
        for layer in module.modules() if way == "parted" else ():
            if isinstance(layer, torch.nn.RNNBase):
                layer.forward = torch._dynamo.disable(layer.forward)
        if way == "exported":
            return exported(module)
        return _traced(program, module, way)

    with torch._dynamo.config.patch(allow_rnn=True):
        return _compared(program, compile_, strict)


def _traced(program: Program, module: torch.nn.Module, way: str) -> Callable[..., Any]:
    return traced(module, program.mode.dynamic, _open_axes(program), way)


def _answers(program: Program, step: int, compile_: Compile | None = None) -> bool:
    """Whether eager, or what ``compile_`` makes of the module, completes one step without an error."""
    side = _Side(program, compile_)
    seen = [side.step(letter) for letter in program.mode.steps[: step + 1]]
    return seen[-1] is not None and not seen[-1].error


def compiled(program: Program, module: torch.nn.Module) -> Callable[..., Any]:
    """The module, compiled as the program's mode says."""
    mode = program.mode
    spec = CompileSpec(
        dynamic=mode.dynamic, backend=mode.backend, options=mode.compile_options, open_axes=_open_axes(program)
    )
    model = compile_with(module, spec)
    return model.freeze() if mode.frozen else model


def _open_axes(program: Program) -> OpenAxes | None:
    return OpenAxes(program.open_axes, program.mode.open == "ones") if program.mode.open else None


def module_of(program: Program, noise: int = -1, compiled: bool = False, wide: bool = False) -> torch.nn.Module:
    """A new module of the program, with the same weights each time; disturbed if ``noise`` >= 0.

    Where it runs ``wide``, in float64, it does not round to float32 in between either.
    """
    source = program.source(noisy=noise >= 0)
    if wide:
        # Weights are drawn as before, and widened afterwards.
        head, forward, body = source.partition("def forward")
        source = head + forward + body.replace("dtype=torch.float32", "dtype=torch.float64")
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "N": _disturber(program)}
    space["cond"] = torch.cond if compiled else plain_cond
    exec(compile(source, f"<program {program.seed}>", "exec"), space)
    torch.manual_seed(program.seed)
    return space["Model"]().train(program.mode.train)


@contextmanager
def _poisoned(call: Callable[..., Any]) -> Iterator[None]:
    """Fills the memory that is allocated for outputs with garbage."""
    if not isinstance(call, tov.CompiledModule):
        yield
        return
    with call.poisoned():
        yield


def _compared(program: Program, compile_: Compile, strict: bool) -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = _Side(program, None)
    try:
        ours = _Side(program, compile_)
    except Exception as error:
        return Result("failed", "crash", f"{type(error).__name__}: {_plain(str(error))}")
    result = Result("ok")
    layouts = program.mode.backend != "export"
    for position, letter in enumerate(program.mode.steps):
        theirs = eager.step(letter)
        if theirs is not None and theirs.error and letter != "X":
            if position == 0:
                return Result("discarded", detail=theirs.error)
            # The second sizes do not fit this program, or its state diverged: both sides stop here.
            break
        # Eager's freed outputs may lie where ours are allocated, which would hide an output that is never written.
        _soil(theirs)
        mine = ours.step(letter)
        if theirs is None or mine is None:
            continue
        if letter == "X" and not theirs.error:
            break
        if _breaks(ours.call) or theirs.written_with_grad:
            _drop_zeros(mine, theirs)
        noise: dict[str, float] = {}
        how = {"strict": strict, "layouts": layouts, "relative": program.mode.relative_tolerance}
        kind, detail = difference(mine, theirs, noise, **how)
        if kind in _OF_VALUES and not theirs.error:
            noise = _noise(program, position, theirs)
            kind, detail = difference(mine, theirs, noise, **how)
        if kind == "stride" and not strict:
            theirs.strides |= promised_strides(module_of(program), program, letter)
            kind, detail = difference(mine, theirs, noise, **how)
        if not kind and ours.books.problem and letter != "X":
            kind, detail = "uncounted", ours.books.problem
        if kind and (result.outcome == "ok" or kind not in SOFT):
            result = Result("failed", kind, detail, position)
        if kind and kind not in SOFT:
            break
        if letter == "X":
            break
    return _reported(result, ours.call)


def _breaks(call: Callable[..., Any]) -> int:
    return call.report.summary.graph_breaks if isinstance(call, tov.CompiledModule) else 0


def _drop_zeros(mine: Observation, theirs: Observation) -> None:
    """Drops the zero gradients that AOTAutograd returns for values on which no output depends.

    Such values leave a graph if a later part of the model takes them, or if they are written into an input.
    """
    for name in [name for name in mine.tensors if name.startswith("grad") and name not in theirs.tensors]:
        if not mine.tensors[name].any():
            del mine.tensors[name]


def _reported(result: Result, call: Callable[..., Any]) -> Result:
    if isinstance(call, tov.CompiledModule):
        summary = call.report.summary
        result.coverage, result.ops, result.fallbacks = summary.coverage, summary.ops_total, summary.fallbacks
        result.compiled = {"fallbacks": call.report.fallback_counts(), "frozen": call.frozen}
    return result


def _noise(program: Program, last: int, clean: Observation) -> dict[str, float]:
    """How far disturbed eager runs deviate from a clean one, at one call, and, at real sizes, eager from float64.

    Errors of long sums have one sign: at real sizes, all inputs are also raised by their last digit. Where the terms
    cancel, random disturbances would allow less than float32 can hold.
    """
    disturbed = [seen for run_ in range(_NOISE_RUNS) if (seen := _last(_Side(program, None, noise=run_), last))]
    factor = _REAL_NOISE_FACTOR[program.mode.precision] if program.mode.real_sizes else NOISE_FACTOR
    noise = noise_of(clean, disturbed, factor)
    if program.mode.real_sizes and (exact := _last(_Side(program, None, wide=True), last)):
        for name, error in errors_of(clean, exact).items():
            noise[name] += _MORE_THAN_EAGER * error
    if program.mode.real_sizes and (raised := _last(_Side(program, None, raised=True), last)):
        for name, moved in noise_of(clean, [raised], 1.0).items():
            noise[name] = max(noise[name], moved)
    return noise


def _last(side: _Side, last: int) -> Observation | None:
    """What one side shows at one call."""
    seen: Observation | None = None
    for letter in side.program.mode.steps[: last + 1]:
        seen = side.step(letter) or seen
    return seen


def _disturber(program: Program) -> Callable[..., Any]:
    """Changes floats by about as much as the program's precision rounds them."""
    size = dict(_NOISE)
    if program.mode.real_sizes:
        size[torch.float32] = _REAL_NOISE
    if program.mode.precision == "bf16":
        size = dict.fromkeys(size, _BF16_NOISE)

    def disturb(value: Any, in_place: bool = False) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(disturb, value)) if type(value) in (tuple, list) else tuple(map(disturb, value))
        if not isinstance(value, torch.Tensor) or value.dtype not in size:
            return value
        factor = 1 + torch.randn(value.shape) * size[value.dtype]
        if in_place:
            return value.copy_((value.float() * factor).to(value.dtype))
        return (value.float() * factor).to(value.dtype)

    return disturb


def _soil(seen: Observation | None) -> None:
    """Leaves garbage in free memory, in blocks of the sizes of a call's tensors."""
    sizes = {tensor.nbytes for tensor in seen.tensors.values()} if seen else set()
    for garbage in _GARBAGE:
        kept = [torch.full((max(1, size // 4),), garbage) for size in sizes for _ in range(12 if size < _LARGE else 2)]
        del kept


def _plain(message: str) -> str:
    """The start of a message, the same on every machine: no folders or addresses."""
    text = re.sub(r"(/[\w.+-]+)+/([\w.-]+)|0x[0-9a-f]+", r"\2", message.strip())
    return " ".join(text.split())[:300]
