"""`MethodCompiler`: compiles a method that the YAML names in another way than as one graph."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.context import WorkerContext
from torchserve_openvino.serving.observation.methods import MethodGraph
from torchserve_openvino.serving.shapes.input_spec import Inputs


@dataclass(frozen=True)
class PreparedMethod:
    """A method that is ready to serve.

    Attributes:
        call: Runs calls of the method.
        graphs: The compiled graphs, by their names in the report.
    """

    call: Callable[..., Any]
    graphs: Mapping[str, Prepared]


class MethodCompiler(Protocol):
    """Compiles methods of one kind. Serving gets those of `generation` from the handler's class."""

    def matches(self, method: MethodGraph) -> bool:
        """Returns True if it compiles this method; then arguments of any kind are recorded for it."""

    def prepare(
        self, method: MethodGraph, calls: Sequence[Inputs], path: str, context: WorkerContext
    ) -> PreparedMethod:
        """Compiles the method, and compares it with eager PyTorch.

        Args:
            method: The method.
            calls: Arguments of the calls that the samples showed.
            path: The method's path in the handler.
            context: What the worker knows; its tracker records everything for the report.
        """


def compiler_of(part: nn.Module | None, compilers: Iterable[MethodCompiler]) -> MethodCompiler | None:
    """Returns the compiler of a part; None if that is a module, or a method that is compiled as one."""
    if not isinstance(part, MethodGraph):
        return None
    return next((each for each in compilers if each.matches(part)), None)
