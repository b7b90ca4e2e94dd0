"""Whether all compiled shapes of a model share one graph of symbolic sizes, and with it one copy of the weights.

OpenVINO packs the weights into a layout of its own for each compiled model. Five batch sizes in five graphs are five
copies; in one graph they are one, and what differs by size are kernels.
"""

import math
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.sections import OpenVINOSection
from torchserve_openvino.report import Summary
from torchserve_openvino.serving.shapes import Shapes

KEY = "handler.openvino.batching.one_graph"
# Below this many bytes of further copies a graph for each shape costs less than one that finds out its sizes at each
# call.
WORTH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Choice:
    """What was decided, and on what grounds.

    Attributes:
        shared: Whether there is one graph.
        why: For the report.
        copies: How many graphs at most are still worth it; 0 where somebody asked for one by name.
    """

    shared: bool
    why: str
    copies: int = 0

    def to_plain(self) -> dict[str, Any]:
        """JSON-safe, for the report."""
        return {"shared": self.shared, "why": self.why}

    def flaw(self, summary: Summary) -> str:
        """What a graph for each shape may do better, once one for all was compiled; empty if nothing.

        Args:
            summary: Of the compiled model.
        """
        if not self.copies:
            return ""
        if summary.coverage < 1.0 or summary.fallbacks:
            return f"{summary.coverage:.1%} of the operators run on OpenVINO, with {summary.fallbacks} fallback(s)"
        # Torch makes another graph where it needs to know a size; many layers tell a batch of 1 from others.
        if summary.recompiles >= self.copies:
            return f"torch needs to know a size, and made {summary.graphs} graphs"
        return ""


def choose(
    eager: Any, section: OpenVINOSection, resolved: ResolvedOptions | None, shapes: Shapes, part: str = ""
) -> Choice:
    """Decides before anything is compiled.

    Args:
        eager: The model.
        section: ``handler.openvino``.
        resolved: The backend's options; None where a foreign backend compiles.
        shapes: What is to be compiled.
        part: Path of a module that a handler calls by itself; empty for the model.
    """
    wanted, count = section.batching.one_graph, len(shapes.signatures)
    if wanted is False:
        return Choice(False, f"{KEY}: false")
    if shapes.inputs is None:
        return Choice(False, "no inputs are declared")
    if section.batching.mode == "dynamic" or resolved is None:
        return Choice(False, "the graph is dynamic anyway" if resolved is not None else "another backend compiles")
    if wanted is True:
        return Choice(True, f"{KEY}: true")
    if part:
        # Its books are kept with those of other parts, so that nothing can be tried.
        return Choice(False, "it is a part of a model")
    if count < 2:
        return Choice(False, "one shape is compiled")
    if resolved.options.device != "CPU":
        return Choice(False, f"{resolved.options.device} runs static shapes best")
    weights = weight_bytes(eager)
    why = f"{count} shapes would hold {count} copies of {weights / 1e6:.0f} MB of weights"
    copies = count - math.ceil(WORTH_BYTES / max(weights, 1))
    return Choice(True, why, copies) if copies > 0 else Choice(False, f"{why}, which is little")


def weight_bytes(eager: Any) -> int:
    """Bytes of a model's parameters and buffers."""
    tensors = {id(t): t for name in ("parameters", "buffers") for t in getattr(eager, name, tuple)()}
    return sum(t.numel() * t.element_size() for t in tensors.values())
