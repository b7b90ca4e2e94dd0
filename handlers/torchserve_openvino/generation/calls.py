"""Graphs of a pipeline or of a loop that generates: compiled each by itself, and called in the models' place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchserve_openvino.config.sections.handler import WarmupInput
from torchserve_openvino.serving.shapes.plan import Shapes


class Calls:
    """Calls of a graph: in eager PyTorch until compiled ones take their place.

    Args:
        graph: The module.
    """

    def __init__(self, graph: nn.Module) -> None:
        self.graph = graph.eval()
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}

    def use(self, shape: Sequence[int], compiled: Callable[..., Any]) -> None:
        """Runs calls whose first input has this shape, without the batch, by ``compiled`` from now on."""
        self._compiled[tuple(shape)] = compiled

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Runs a call.

        Raises:
            KeyError: Graphs are compiled, but none for this shape. Requests of such sizes are refused before.
        """
        if not self._compiled:
            return self.graph(*inputs, **named)
        first = next(iter((*inputs, *named.values())))
        compiled = self._compiled[tuple(first.shape[1:])]
        # Pixels of a picture file lie in another order, for which a graph would be compiled anew.
        ordered = {name: tensor.contiguous() for name, tensor in named.items()}
        return compiled(*(tensor.contiguous() for tensor in inputs), **ordered)


@dataclass(frozen=True)
class Part:
    """One graph for one size.

    Attributes:
        name: For the report, with the size where there are several.
        calls: The graph, whose calls the compiled one takes over.
        inputs: Its inputs, one item each.
        batches: Batch sizes that it is called with.
        known: What to compile, instead of what follows from ``inputs``.
    """

    name: str
    calls: Calls
    inputs: Sequence[WarmupInput]
    batches: tuple[int, ...] = (1,)
    known: Shapes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input, without the batch; empty where none is declared."""
        return tuple(int(size) for size in self.inputs[0].shape) if self.inputs else ()
