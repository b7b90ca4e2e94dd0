"""Decides whether all compiled shapes of a model share one graph of symbolic sizes, and so one copy of the weights.

OpenVINO packs the weights into a layout of its own for each compiled model. Five batch sizes in five graphs need five
copies; one graph needs one, and only the kernels differ by size. Resolving the sizes at each call costs about a
millisecond for 300 operators, which matters for a single item but not for a batch: unless one graph is requested
explicitly, a batch of 1 keeps a graph of its own.

Convolutions of pictures are different: where a size that they run along is open, OpenVINO changes the layout between
them and what follows, so that their graphs are separate as long as they fit into memory. Those of sounds and texts
become matrix products (`passes/ov/open_lengths.py`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from torchserve_openvino.backend import OpenAxes
from torchserve_openvino.config import ServingConfig, vocabulary
from torchserve_openvino.report import Summary
from torchserve_openvino.serving.shapes.plan import Shapes

KEY = "handler.openvino.batching.one_graph"
# Sharing a graph to save fewer bytes than this is not worth the time that it costs.
WORTH_BYTES = 128 * 2**20
# What separate graphs of a convolutional model may take, all together.
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class GraphChoice:
    """A decision and its reason.

    Attributes:
        why: The reason, as the report states it.
        open_axes: Axes that graphs keep symbolic; None makes a graph for each shape.
        limit: How many graphs at most are still worth it; 0 for no limit, as where one graph was requested explicitly.
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
        """Returns what is wrong with the shared graphs, once compiled, that separate ones may avoid; empty if nothing.

        Args:
            summary: Summary of the compiled model.
        """
        if not self.limit:
            return ""
        if summary.coverage < 1.0 or summary.fallbacks:
            return f"{summary.coverage:.1%} of the operators run on OpenVINO, with {summary.fallbacks} fallback(s)"
        if summary.recompiles >= self.limit:
            return f"torch needs to know more sizes, and made {summary.graphs} graphs"
        return ""


def choose(eager: Any, config: ServingConfig, shapes: Shapes, part: str = "") -> GraphChoice:
    """Decides before anything is compiled.

    Args:
        eager: The model.
        config: Its settings.
        shapes: What is to be compiled.
        part: Path of a module that a handler calls by itself; empty for the whole model.
    """
    section, pt2, resolved = config.openvino, config.pt2, config.backend
    setting, count = section.batching.one_graph, len(shapes.signatures)
    if setting is False:
        return GraphChoice(f"{KEY}: false")
    if shapes.inputs is None:
        return GraphChoice("no inputs are declared")
    # `export` always makes a graph for each shape, and `auto` may choose it.
    if resolved is None or vocabulary.canonical(pt2.backend) not in vocabulary.BY_DYNAMO:
        return GraphChoice(f"the backend {pt2.backend} compiles")
    if section.batching.mode == "dynamic" or pt2.dynamic:
        return GraphChoice("the graph is dynamic anyway")
    if setting is True:
        return GraphChoice(f"{KEY}: true", shapes.inputs.open_axes(ones=True))
    if part:
        # Parts share one report, so the result of a trial could not be told from other parts'.
        return GraphChoice("it is a part of a model")
    if resolved.options.device != "CPU":
        return GraphChoice(f"{resolved.options.device} runs static shapes best")
    weights = weight_bytes(eager)
    why = f"{count} shape(s) would hold {count} cop{'y' if count == 1 else 'ies'} of {weights / 1e6:.0f} MB of weights"
    if shapes.inputs.dims and _convolves(eager) and count * weights <= MOST_BYTES:
        return GraphChoice(f"{why}, but convolutions along an open size are slower")
    limit = count - math.ceil(WORTH_BYTES / max(weights, 1))
    if len({signature.batch == 1 for signature in shapes.signatures}) > limit:
        return GraphChoice(f"{why}; one graph would save too little")
    return GraphChoice(why, shapes.inputs.open_axes(ones=False), limit)


def _convolves(eager: Any) -> bool:
    kinds = torch.nn.Conv2d, torch.nn.Conv3d
    return any(
        isinstance(module, kinds) and max(module.kernel_size) > 1 for module in getattr(eager, "modules", tuple)()
    )


def weight_bytes(eager: Any) -> int:
    """Returns the size of a model's parameters and buffers, in bytes."""
    tensors = {id(t): t for name in ("parameters", "buffers") for t in getattr(eager, name, tuple)()}
    return sum(t.numel() * t.element_size() for t in tensors.values())
