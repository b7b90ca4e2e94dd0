"""Runs lists of passes, measures each pass, and names the pass that fails."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.passes.pass_context import PassContext

logger = logging.getLogger(__name__)

T = TypeVar("T")
# When a pass runs: on a whole lowered graph; on the graph of a partition; on its ov.Model; on a copy of that model,
# each time that it is compiled for a device.
Stage = Literal["graph", "partition", "model", "device"]


class PassError(RuntimeError):
    """An unexpected error in a pass.

    Attributes:
        name: The pass.
    """

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        super().__init__(f"the pass {name} failed: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Pass(Generic[T]):
    """An entry of a list of passes.

    Attributes:
        run: Changes a graph or a model in place; results besides it are attributes of the context.
        stage: When it runs.
        when: Condition for it to run; None to run always.
    """

    run: Callable[[T, PassContext], None]
    stage: Stage
    when: Callable[[PassContext], bool] | None = None

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.run.__name__


def due(passes: Sequence[Pass[T]], stage: Stage, context: PassContext) -> list[Pass[T]]:
    """Returns the passes of a stage whose conditions hold."""
    return [pass_ for pass_ in passes if pass_.stage == stage and (pass_.when is None or pass_.when(context))]


def run_passes(passes: Sequence[Pass[T]], stage: Stage, subject: T, context: PassContext) -> None:
    """Runs the passes of a stage whose conditions hold, in their order.

    Args:
        passes: `FX_PASSES` or `OV_PASSES`.
        stage: Only these are run.
        subject: The graph or model; changed in place.
        context: Gets the results and times.

    Raises:
        TorchServeOpenVINOError: A pass refuses the graph, with its reason.
        PassError: A pass failed unexpectedly.
    """
    for pass_ in due(passes, stage, context):
        start = time.perf_counter()
        try:
            pass_.run(subject, context)
        except TorchServeOpenVINOError:
            raise
        except Exception as error:
            raise PassError(pass_.name, error) from error
        context.seconds[pass_.name] = time.perf_counter() - start
    if logger.isEnabledFor(logging.DEBUG):
        slowest = sorted(context.seconds.items(), key=lambda item: -item[1])
        logger.debug("Passes (%s): %s", stage, ", ".join(f"{name} {seconds:.4f} s" for name, seconds in slowest))
