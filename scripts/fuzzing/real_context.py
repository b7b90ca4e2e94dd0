"""A program of real sizes under construction: sizes are drawn constants, and each line has an estimated cost."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fuzzing.context import Condition, Context
from fuzzing.cost import cost_of, parameters_of
from fuzzing.draft import Draft, Skip, Val
from fuzzing.program import Input, Line, Mode, line_source
from fuzzing.values import number

MAX_NUMEL = 1 << 22
# Of one model: estimated seconds of one call in eager, elements of its weights and of its inputs.
MAX_SECONDS = 0.035
MAX_PARAMETERS = 6_000_000
MAX_INPUT_ELEMENTS = 2_500_000
# Operators for small sizes take values up to this size.
_SMALL = 1 << 16
_MAX_FLOAT = {torch.float32: 1e6, torch.float64: 1e6, torch.bfloat16: 1e6, torch.float16: 2e3}


class RealContext(Context):
    """What blocks build programs with.

    Args:
        rng: Source of all choices.
        mode: How the program will run.
        seed: Of the values.
        dtype: Float type of most values.
    """

    max_inputs = 8

    def __init__(self, rng: random.Random, mode: Mode, seed: int, dtype: str) -> None:
        super().__init__(rng, mode, seed, dtype)
        self.block = ""
        self.infinite = False
        # The module's state on the meta device, which computes shapes only.
        self.blank = torch.nn.Module()
        self.budget = MAX_SECONDS / (3 if mode.grad == "grad" else 1)
        self.parameters = MAX_PARAMETERS
        self.elements = MAX_INPUT_ELEMENTS
        self._products: dict[int, str] = {}

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.float_dtype)  # type: ignore[no-any-return]

    @property
    def typed(self) -> str:
        """The dtype argument of a module or a factory."""
        return "" if self.float_dtype == "float32" else f", dtype=torch.{self.float_dtype}"

    # Sizes

    def constant(self, sizes: Sequence[int] | int) -> str:
        """The name of a size that is the same in every call, drawn from ``sizes``; equal sizes have one name."""
        size = sizes if isinstance(sizes, int) else self.choice(sizes)
        for name, value in self.constants.items():
            if value == size:
                return name
        name = f"n{len(self.constants)}"
        self.constants[name] = self.env[name] = size
        return name

    def product(self, text: str) -> str:
        """An expression of constants, by which `named` knows its value."""
        text = f"({text})"
        self._products.setdefault(self.number(text), text)
        return text

    def number(self, size: str) -> int:
        """The value of a constant, a named size or a product, in the first call."""
        return number(size, {**self.constants, **self.mode.sizes[0]})

    def named(self, size: int) -> str:
        """How programs write a size that does not change between calls."""
        for name, value in self.constants.items():
            if value == size:
                return name
        return self._products.get(size) or (self.constant(size) if size > 4 else str(size))

    def batch_or_length(self, size: int) -> int | str:
        """How programs write a size that may change between calls.

        Raises:
            Skip: It is none of the named sizes.
        """
        first = self.mode.sizes[0]
        if size == 1:
            return 1
        for name, value in first.items():
            if value == size:
                return name
        if self.mode.sizes[1] != first:
            raise Skip
        return size

    # Values

    def floats(self, shape: Sequence[int | str], kinds: Sequence[str] = ()) -> Val:
        """A float input."""
        usual = ("normal", "normal", "normal", "offset", "spread", "outliers", "ties", "far", "small", "grid")
        return self.input(shape, self.float_dtype, self.choice(kinds or usual))

    def recent(self, *conditions: Condition) -> Val | None:
        """The latest value that meets all conditions, mostly."""
        fit = [value for value in self.values if all(condition(value) for condition in conditions)]
        return fit[-1] if fit and self.chance(0.8) else None

    def take(self, *conditions: Condition) -> Val:
        return super().take(*conditions, lambda value: value.tensor.numel() <= _SMALL)

    # Adding

    def _add_input(self, spec: Input) -> Val:
        elements = math.prod(number(size, {**self.constants, **self.mode.sizes[0]}) for size in spec.shape)
        if elements > self.elements:
            raise Skip
        self.elements -= elements
        return super()._add_input(spec)

    def line(self, code: str, *args: Val, exact: str = "no", uses: Sequence[str] = ()) -> Val:
        """Adds a line that defines one value.

        Raises:
            Skip: Eager refuses it, it costs too much, or its values are unusable.
        """
        self.add(self.block, Draft(code, args, exact, uses=tuple(uses)))
        return self.values[-1]

    def lines_of(self, code: str, count: int, *args: Val, exact: str = "no", uses: Sequence[str] = ()) -> list[Val]:
        """Adds a line that defines several values; raises as `line`."""
        self.add(self.block, Draft(code, args, exact, count, uses=tuple(uses)))
        return self.values[-count:]

    def layer(self, code: str) -> str:
        """Adds a module of ``torch.nn``; returns its name."""
        return self.attribute("m", f"torch.nn.{code}")

    def weight(self, shape: str, scale: str = "", positive: bool = False) -> str:
        """Adds a parameter; returns its name."""
        drawn = f"torch.rand({shape}{self.typed}) + 0.5" if positive else f"torch.randn({shape}{self.typed}){scale}"
        return self.attribute("p", f"torch.nn.Parameter({drawn})")

    def attribute(self, prefix: str, code: str) -> str:
        name = f"{prefix}{len(self.state)}"
        try:
            with torch.device("meta"):
                layer = eval(code.replace("NAME", name), {**self.env, "self": self.blank})
        except Exception as error:
            raise Skip from error
        self.parameters -= parameters_of(layer)
        if self.parameters < 0:
            raise Skip
        if not code.startswith("self."):
            setattr(self.blank, name, layer)
        self.blank.train(self.mode.train)
        return super().attribute(prefix, code)

    def add(self, op: str, draft: Draft) -> None:
        names = tuple(value.name for value in draft.args)
        code = line_source(Line(op, draft.code, names))
        tensors = {value.name: value.tensor for value in draft.args}
        seconds = cost_of(code, {**self.env, "self": self.blank}, tensors)
        if seconds > self.budget:
            raise Skip
        super().add(op, draft)
        self.budget -= seconds

    def _sound(self, tensor: torch.Tensor) -> bool:
        if tensor.is_complex() or tensor.layout is not torch.strided or not 0 < tensor.numel() <= MAX_NUMEL:
            return False
        if not tensor.is_floating_point():
            return True
        values = tensor.detach()
        finite = values.isfinite()
        if not bool(finite.all()):
            if not self.infinite or bool((~finite & (values != float("-inf"))).any()):
                return False
            values = values[finite]
        return not values.numel() or bool(values.abs().max() <= _MAX_FLOAT[tensor.dtype])

    # Undoing

    def mark(self) -> tuple[Any, ...]:
        """A state to which `undo` returns."""
        counts = len(self.inputs), len(self.lines), len(self.values), len(self.state), len(self.constants)
        return (*counts, self._names, self.budget, self.parameters, self.elements)

    def undo(self, mark: tuple[Any, ...]) -> None:
        """Forgets what was added since the mark."""
        inputs, lines, values, state, constants, self._names, self.budget, self.parameters, self.elements = mark
        del self.inputs[inputs:], self.lines[lines:], self.values[values:]
        for name in list(self.state)[state:]:
            del self.state[name]
            for module in (self.module, self.blank):
                if hasattr(module, name):
                    delattr(module, name)
        for name in list(self.constants)[constants:]:
            del self.constants[name], self.env[name]
        self._products = {value: text for value, text in self._products.items() if self._known(text)}
        self.infinite = False
        used = Counter(name for line in self.lines for name in line.args)
        for value in self.values:
            value.used = used[value.name]

    def _known(self, text: str) -> bool:
        try:
            self.number(text)
        except NameError:
            return False
        return True
