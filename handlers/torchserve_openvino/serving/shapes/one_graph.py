"""Whether all compiled shapes of a model share a graph of symbolic sizes, and with it one copy of the weights.

OpenVINO packs the weights into a layout of its own for each compiled model. Five batch sizes in five graphs are five
copies; in one graph they are one, and what differs by size are kernels. Finding out the sizes at each call costs about
a millisecond for 300 operators, which a lone item feels and a batch does not: unless one graph is asked for by name, a
batch of 1 keeps a graph of its own.
"""

import math
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.backend import OpenAxes
from torchserve_openvino.config import ServingConfig, backends
from torchserve_openvino.report import Summary
from torchserve_openvino.serving.shapes.plan import Shapes

KEY = "handler.openvino.batching.one_graph"
# `export` always makes a graph for each shape, and `auto` may choose it.
# Saving less than this is not worth the time.
WORTH_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Choice:
    """What was decided, and on what grounds.

    Attributes:
        why: For the report.
        open_axes: What graphs leave open; None makes one for each shape.
        limit: How many graphs at most are still worth it; 0 where somebody asked for one by name.
    """

    why: str
    open_axes: OpenAxes | None = None
    limit: int = 0

    def to_plain(self) -> dict[str, Any]:
        """JSON-safe, for the report."""
        shared = self.open_axes is not None
        alone = self.open_axes is not None and not self.open_axes.ones
        graphs = "one for all shapes" if shared else "one for each shape"
        return {"shared": shared, "graphs": f"{graphs} but a batch of 1" if alone else graphs, "why": self.why}

    def flaw(self, summary: Summary) -> str:
        """What a graph for each shape may do better, once fewer were compiled; empty if nothing.

        Args:
            summary: Of the compiled model.
        """
        if not self.limit:
            return ""
        if summary.coverage < 1.0 or summary.fallbacks:
            return f"{summary.coverage:.1%} of the operators run on OpenVINO, with {summary.fallbacks} fallback(s)"
        if summary.recompiles >= self.limit:
            return f"torch needs to know more sizes, and made {summary.graphs} graphs"
        return ""


def choose(eager: Any, config: ServingConfig, shapes: Shapes, part: str = "") -> Choice:
    """Decides before anything is compiled.

    Args:
        eager: The model.
        config: Its settings.
        shapes: What is to be compiled.
        part: Path of a module that a handler calls by itself; empty for the model.
    """
    section, pt2, resolved = config.openvino, config.pt2, config.backend
    wanted, count = section.batching.one_graph, len(shapes.signatures)
    if wanted is False:
        return Choice(f"{KEY}: false")
    if shapes.inputs is None:
        return Choice("no inputs are declared")
    if resolved is None or backends.canonical(pt2.backend) not in backends.BY_DYNAMO:
        return Choice(f"the backend {pt2.backend} compiles")
    if section.batching.mode == "dynamic" or pt2.dynamic:
        return Choice("the graph is dynamic anyway")
    if wanted is True:
        return Choice(f"{KEY}: true", shapes.inputs.open_axes(ones=True))
    if part:
        # Its books are kept with those of other parts, so that nothing can be tried.
        return Choice("it is a part of a model")
    if resolved.options.device != "CPU":
        return Choice(f"{resolved.options.device} runs static shapes best")
    weights = weight_bytes(eager)
    why = f"{count} shape(s) would hold {count} cop{'y' if count == 1 else 'ies'} of {weights / 1e6:.0f} MB of weights"
    limit = count - math.ceil(WORTH_BYTES / max(weights, 1))
    if len({signature.batch == 1 for signature in shapes.signatures}) > limit:
        return Choice(f"{why}, which is little to save")
    return Choice(why, shapes.inputs.open_axes(ones=False), limit)


def weight_bytes(eager: Any) -> int:
    """Bytes of a model's parameters and buffers."""
    tensors = {id(t): t for name in ("parameters", "buffers") for t in getattr(eager, name, tuple)()}
    return sum(t.numel() * t.element_size() for t in tensors.values())
