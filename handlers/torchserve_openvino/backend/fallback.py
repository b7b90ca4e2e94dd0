"""Where a subgraph runs that OpenVINO could not compile: eager PyTorch, or Inductor where the config asks for it."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from torchserve_openvino.backend.partition import Part
from torchserve_openvino.backend.settings import BackendSettings

logger = logging.getLogger(__name__)


def fallback_for(part: Part, settings: BackendSettings) -> Callable[..., Any]:
    """The subgraph as a function.

    Args:
        part: The subgraph.
        settings: Where it shall run; its tracker counts a failure of Inductor itself.
    """
    if settings.fallback_to != "inductor":
        return part.graph.forward
    return _InductorThenEager(part, settings)


class _InductorThenEager:
    """Compiles at the first call; a failure of Inductor is counted, and eager takes over for good."""

    def __init__(self, part: Part, settings: BackendSettings) -> None:
        self._part = part
        self._settings = settings
        self._run: Callable[..., Any] = torch.compile(part.graph, backend="inductor", dynamic=None)
        self._proven = False

    def __call__(self, *args: Any) -> Any:
        if self._proven:
            return self._run(*args)
        try:
            result = self._run(*args)
        except Exception as error:
            self._settings.tracker.add_fallback(
                "compile_failed", self._part.name, to="eager", reason=f"inductor: {error}"
            )
            logger.warning("Fallback: inductor failed for %s, eager is used: %s", self._part.name, error)
            self._run = self._part.graph.forward
            result = self._run(*args)
        self._proven = True
        return result
