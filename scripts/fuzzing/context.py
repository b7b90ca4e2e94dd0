"""A program under construction: each line runs in eager PyTorch at once, so that shapes and types are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuzzing.draft import Draft, Skip, Val, storage_of
from fuzzing.program import Input, Line, Mode, Program, Size, line_source
from fuzzing.values import arguments

MAX_INPUTS = 6
MAX_NUMEL = 4096
# Values stay well within the range of float32 and float16: an overflow says nothing about a compiler.
_MAX_FLOAT = {torch.float32: 1e3, torch.float64: 1e3, torch.bfloat16: 1e3, torch.float16: 1e2}
_MAX_INT = 1 << 20
# Multiples of 1 / `_GRID`, up to `_MAX_EXACT`, are added and multiplied without rounding.
_GRID = 64.0
_MAX_EXACT = 2048.0
_LOW_PRECISION = (torch.float16, torch.bfloat16)


Condition = Callable[[Val], bool]


class Context:
    """What the registry's entries build programs with.

    Args:
        rng: Source of all choices.
        mode: How the program will run.
        dtype: Float type of most values.
    """

    max_inputs = MAX_INPUTS

    def __init__(self, rng: random.Random, mode: Mode, seed: int, dtype: str) -> None:
        self.rng = rng
        self.mode = mode
        self.float_dtype = dtype
        self.seed = seed
        self.inputs: list[Input] = []
        self.state: dict[str, str] = {}
        self.constants: dict[str, int] = {}
        self.lines: list[Line] = []
        self.values: list[Val] = []
        self.exact_storages: set[int] = set()
        self.module = torch.nn.Module()
        self.env: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "self": self.module, "cond": plain_cond}
        self._kept: list[Any] = []
        self._names = 0

    # Choosing

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def choice(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def integer(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return self.rng.randint(low, high)

    def dim_of(self, value: Val) -> int:
        """One of a value's dimensions, possibly counted from the end."""
        if not value.dim:
            raise Skip
        return self.rng.randrange(-value.dim, value.dim)

    def take(self, *conditions: Condition) -> Val:
        """A value that meets all conditions, preferably a recent or unused one.

        Raises:
            Skip: There is none.
        """
        fit = [value for value in self.values if all(condition(value) for condition in conditions)]
        if not fit:
            raise Skip
        weights = [(3 if not v.used else 1) * (2 if i >= len(fit) - 4 else 1) for i, v in enumerate(fit)]
        return self.rng.choices(fit, weights)[0]

    # Adding

    def input(self, shape: Sequence[Size], dtype: str, kind: str, low: Size = 0, high: Size = 4) -> Val:
        """An argument of `forward` with these properties, new or existing."""
        requested = (tuple(shape), dtype, kind, low, high)
        for known in self.inputs:
            if (known.shape, known.dtype, known.kind, known.low, known.high) == requested and self.chance(0.4):
                return next(value for value in self.values if value.name == known.name)
        if len(self.inputs) >= self.max_inputs:
            raise Skip
        layout = self.rng.choices(["plain", "transposed", "strided", "offset"], [12, 1, 1, 1])[0]
        spec = Input(f"x{len(self.inputs)}", requested[0], dtype, kind, low, high, layout, grad=self.chance(0.6))
        return self._add_input(spec)

    def twin_input(self) -> Val:
        """An argument that is the same tensor as another one."""
        if not self.inputs or len(self.inputs) >= self.max_inputs:
            raise Skip
        first = self.choice(self.inputs)
        return self._add_input(Input(**{**vars(first), "name": f"x{len(self.inputs)}", "same_as": first.name}))

    def _add_input(self, spec: Input) -> Val:
        self.inputs.append(spec)
        if spec.same_as:
            tensor = self.env[spec.same_as]
        else:
            # The values depend on seed and position, which must be those of the finished program.
            blank = [Input(f"_{i}", (1,), "float32") for i in range(len(self.inputs) - 1)]
            program = Program(self.seed, (*blank, spec), {}, (), (), "", self.mode, self.constants)
            tensor = arguments(program, "A", self.mode.grad == "grad")[-1]
        exact = spec.kind not in {"normal", "positive"}
        return self._value(spec.name, tensor, exact)

    def attribute(self, prefix: str, code: str) -> str:
        """Adds a module, parameter, buffer or plain attribute to the model; returns its name."""
        name = f"{prefix}{len(self.state)}"
        if code.startswith("self."):
            code = code.replace("NAME", name)
        try:
            if code.startswith("self."):
                eval(code, self.env)
            else:
                setattr(self.module, name, eval(code, self.env))
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            raise Skip from error
        self.state[name] = code
        self.module.train(self.mode.train)
        return name

    def buffer(self, code: str) -> str:
        """Adds a buffer with these values; returns its name."""
        return self.attribute("b", f'self.register_buffer("NAME", {code})')

    def add(self, op: str, draft: Draft) -> None:
        """Runs a line and keeps it.

        Raises:
            Skip: Eager refuses it, or its values are unusable.
        """
        names = [f"v{self._names + i}" for i in range(draft.out)]
        args = tuple(value.name for value in draft.args)
        at_risk = self.values if draft.writes else ()
        storages = {storage_of(value.tensor): value.tensor.untyped_storage() for value in at_risk}
        before = [(storage, storage.clone()) for storage in storages.values()]
        result = self._run(line_source(Line(op, draft.code, args)))
        results = list(result) if draft.out > 1 or isinstance(result, (tuple, list)) else [result]
        try:
            if draft.out and len(results) != draft.out:
                raise Skip
            if draft.out and not all(isinstance(t, torch.Tensor) and self._sound(t) for t in results):
                raise Skip
            if draft.writes and not all(self._sound(draft.args[i].tensor) for i in draft.writes):
                raise Skip
        except Skip:
            for storage, old in before:
                storage.copy_(old)
            raise
        exact_in = all(value.exact for value in draft.args if value.is_float)
        touched = results if draft.out else [draft.args[i].tensor for i in draft.writes]
        exact = draft.exact == "move" or (draft.exact == "arith" and exact_in and all(map(_on_grid, touched)))
        self.lines.append(Line(op, draft.code, args, tuple(names), exact, draft.writes, draft.uses))
        for value in draft.args:
            value.used += 1
        if draft.writes and not (exact and exact_in):
            self.exact_storages.difference_update({storage_of(draft.args[i].tensor) for i in draft.writes})
        self._names += draft.out
        for name, tensor in zip(names, results, strict=False):
            self._value(name, tensor, exact and exact_in)

    def _run(self, code: str) -> Any:
        try:
            with (
                torch.inference_mode(self.mode.grad == "inference_mode"),
                torch.set_grad_enabled(self.mode.grad == "grad"),
            ):
                if "=" in code and _is_statement(code):
                    exec(code, self.env)
                    return None
                return eval(code, self.env)
        except Skip:
            raise
        except Exception as error:
            raise Skip from error

    def _value(self, name: str, tensor: torch.Tensor, exact: bool) -> Val:
        self.env[name] = tensor
        self._kept.append(tensor)
        known = any(storage_of(value.tensor) == storage_of(tensor) for value in self.values)
        if exact and not known:
            self.exact_storages.add(storage_of(tensor))
        value = Val(name, tensor, self.exact_storages)
        self.values.append(value)
        return value

    def _sound(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() > MAX_NUMEL or tensor.is_complex() or tensor.layout is not torch.strided:
            return False
        if not tensor.numel():
            return self.chance(0.1)
        if tensor.is_floating_point():
            values = tensor.detach().float()
            return bool((values.abs() <= _MAX_FLOAT[tensor.dtype]).all())
        if tensor.dtype in (torch.int64, torch.int32):
            return bool((tensor.abs() <= _MAX_INT).all()) or tensor.numel() < 3
        return True


def plain_cond(predicate: torch.Tensor, if_true: Any, if_false: Any, operands: tuple[Any, ...]) -> Any:
    """`torch.cond` in plain Python; the real one compiles even in eager mode."""
    return (if_true if bool(predicate) else if_false)(*operands)


def _is_statement(code: str) -> bool:
    try:
        compile(code, "", "eval")
    except SyntaxError:
        return True
    return False


def _on_grid(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    if tensor.dtype in _LOW_PRECISION:
        return False
    values = tensor.detach() * _GRID
    return bool(((values == values.round()) & (values.abs() <= _GRID * _MAX_EXACT)).all())
