"""`WorkerContext`: what a worker knows when it brings models to READY."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.report import Tracker
from torchserve_openvino.serving.modes import SERVING, Modes
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
