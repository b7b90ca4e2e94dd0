"""Calls of a model's graphs: in eager PyTorch until compiled ones take their place, in pieces that were compiled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.backend import eager_watch
from torchserve_openvino.generation.calls import Calls, Part
from torchserve_openvino.serving.modes import SERVING
from torchserve_openvino.serving.shapes.inputs import ordinary
from torchserve_openvino.serving.shapes.plan import Shapes
from torchserve_openvino.serving.shapes.value_sets import ValueSet
from torchserve_openvino.serving.shapes.warmup import Case

Make = Callable[[int, int], list[Tensor]]


class Rows(Calls):
    """Calls of a graph whose inputs have rows that do not depend on each other.

    Args:
        name: For the report.
        graph: The module.
        batches: Numbers of rows that are compiled; others run in several calls.
        make: Makes inputs to compile and to verify with, from a number of rows and a seed.
    """

    def __init__(self, name: str, graph: nn.Module, batches: Sequence[int], make: Make) -> None:
        super().__init__(graph)
        self._name, self._make = name, make
        self._batches = tuple(sorted({1, *batches}))
        self._run: Callable[..., Any] = self.graph

    @property
    def part(self) -> Part:
        """What to compile."""
        known = Shapes(None, cases=[self._case(rows) for rows in self._batches])
        return Part(self._name, self, (), self._batches, known)

    def use(self, shape: Sequence[int], compiled: Any) -> None:
        """Runs calls by what was compiled from now on."""
        # Its inputs are made here, so that there is nothing to check or to pad.
        self._run = compiled.compiled

    def __call__(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        """Runs a call of any number of rows, in as many calls as it takes.

        Args:
            *inputs: Contiguous, ``[rows, ...]`` each.
            **named: None.

        Returns:
            The outputs, ``[rows, ...]`` each.
        """
        rows = len(inputs[0])
        with eager_watch.compiled(), SERVING.on():
            columns = [ordinary(each) for each in inputs]
            outputs = [
                self._once([each[first:last] for each in columns] if last - first < rows else columns)
                for first, last in self._pieces(rows)
            ]
        return outputs[0] if len(outputs) == 1 else tuple(torch.cat(each) for each in zip(*outputs, strict=True))

    def _once(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = self._run(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    def _pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        first = 0
        while first < rows:
            size = max(each for each in self._batches if each <= rows - first)
            yield first, first + size
            first += size

    def _case(self, rows: int) -> Case:
        def others() -> list[ValueSet]:
            return [ValueSet(f"random {seed}", (tuple(self._make(rows, seed)), {})) for seed in (1, 2, 3)]

        return Case(f"batch {rows}", (tuple(self._make(rows, 0)), {}), others=others)


@dataclass(frozen=True)
class Draw:
    """Random values for inputs, the same for an equal seed."""

    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int) -> "Draw":
        """Returns values for a seed."""
        return cls(torch.Generator().manual_seed(seed))

    def numbers(self, *shape: int, below: int) -> Tensor:
        """Returns int64 from 0."""
        return torch.randint(0, max(1, below), shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Returns float32."""
        return torch.randn(shape, generator=self.generator)
