"""`WorkerContext`: what a worker knows when it brings models to READY."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.report import Tracker
from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.modes import SERVING, Modes
from torchserve_openvino.serving.observation.methods import MethodGraph
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.threads import ThreadPlan


def _serving_modes(inputs: Inputs) -> Modes:
    return SERVING


@dataclass(frozen=True)
class WorkerContext:
    """What all models of one worker are compiled with. `dataclasses.replace` makes one for a part of them.

    Attributes:
        config: The handler's settings.
        model_dir: The unpacked archive, with the compiled graphs that came with it.
        threads: This worker's share of the cores.
        batch_size: TorchServe's batchSize, or the largest batch of a part.
        counters: Counts what happens to requests.
        freezes: Whether calls run without guards, where the YAML has ``freeze: auto``.
        modes_for: Returns the modes in which the handler calls ``self.model``, for the model's inputs.
        tracker: Records everything for the report; None makes a new one for each model.
    """

    config: ServingConfig
    model_dir: Path
    threads: ThreadPlan
    batch_size: int
    counters: Counters
    freezes: bool = False
    modes_for: Callable[[Inputs], Modes] = _serving_modes
    tracker: Tracker | None = None


# --- `MethodCompiler`: compiles a method that the YAML names in another way than as one graph ---------------------


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
    return next((compiler for compiler in compilers if compiler.matches(part)), None)
