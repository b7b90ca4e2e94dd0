"""Keeps a quantized model only if it loses little; leaves the layers in f32 that cost the most, if that helps."""

import copy
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.ops.names import op_name
from torchserve_openvino.packaging.quantizing.accuracy import AccuracyComparison, Score

logger = logging.getLogger(__name__)

# Requests on which the cost of each layer is estimated, in eager PyTorch.
_PROBES = 4


@dataclass(frozen=True)
class Step:
    """A version of the model that was tried.

    Attributes:
        in_f32: How many layers compute in f32.
        added: Names of those that the version before did not leave in f32.
        value: Of the metric.
        drop: Its loss against f32.
        milliseconds: Median time of a call.
    """

    in_f32: int
    added: tuple[str, ...]
    value: float
    drop: float
    milliseconds: float


@dataclass(frozen=True)
class AccuracyProof:
    """What was compared.

    Attributes:
        metric: What was measured.
        items: Number of requests.
        f32: Its value in f32.
        f32_milliseconds: Median time of a call in f32.
        steps: The versions that were tried, in order.
        in_f32: Layers that are left in f32 in the version that is kept.
    """

    metric: str
    items: int
    f32: float
    f32_milliseconds: float
    steps: tuple[Step, ...]
    in_f32: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it JSON-safe."""
        return asdict(self)


Compile = Callable[[nn.Module], CompiledModule]


def gated(
    model: GraphModule, judge: AccuracyComparison, max_drop: float, compile: Compile, *, mixes: bool
) -> tuple[GraphModule, AccuracyProof]:
    """Returns the fastest version of a quantized model that loses little enough.

    Args:
        model: The quantized model.
        judge: Knows the requests, and the answers in f32.
        max_drop: `handler.openvino.quantize.max_drop`.
        compile: Compiles a version, as it will be served.
        mixes: Whether layers may be left in f32.

    Raises:
        PackagingError: No version loses little enough.
    """
    reference, steps = judge.reference, list[Step]()
    names: list[str] | None = None if mixes else []
    count, last = 0, list[str]()
    passed: tuple[int, GraphModule] | None = None
    failed = -1
    while True:
        tried = without(model, frozenset(names[:count])) if count and names else model
        score = _served(judge, compile, tried)
        drop = reference.value - score.value
        added = tuple(name for name in (names or [])[:count] if name not in last)
        steps.append(Step(count, added, round(score.value, 6), round(drop, 6), round(score.seconds * 1e3, 3)))
        last = (names or [])[:count]
        logger.info(
            "%d layer(s) in f32: %s %.4f (f32 %.4f), %.2f ms", count, judge.metric, score.value, reference.value,
            score.seconds * 1e3,
        )  # fmt: skip
        if drop <= max_drop:
            passed = count, tried
        else:
            failed = count
            if names is None:
                names = _by_cost(model, judge)
        if passed is None and names is not None and failed >= len(names):
            raise PackagingError(_refusal(judge, reference, steps, max_drop, mixes=bool(names)))
        if passed is not None and passed[0] - failed <= 1:
            break
        # Twice as many until some version passes; then the middle between that and the last that failed.
        count = min(len(names or []), max(1, 2 * count)) if passed is None else (passed[0] + failed) // 2
    floats = (names or [])[: passed[0]]
    milliseconds = round(reference.seconds * 1e3, 3)
    proof = AccuracyProof(
        judge.metric, judge.items, round(reference.value, 6), milliseconds, tuple(steps), tuple(floats)
    )  # fmt: skip
    return passed[1], proof


def _served(judge: AccuracyComparison, compile: Compile, model: GraphModule) -> Score:
    compiled = compile(model)
    try:
        return judge.score(compiled)
    finally:
        compiled.drop()
        torch.compiler.reset()


def _by_cost(model: GraphModule, judge: AccuracyComparison) -> list[str]:
    """Returns the layers in the order of what each costs: how much nearer the outputs come if it alone is in f32."""
    names = layers_of(model)
    logger.info("estimating what each of %d layers costs, on %d requests in eager PyTorch", len(names), _PROBES)
    whole = judge.distance(model, _PROBES)
    gains = {name: whole - judge.distance(without(model, {name}), _PROBES) for name in names}
    return sorted(gains, key=lambda name: -gains[name])


def _refusal(judge: AccuracyComparison, reference: Score, steps: list[Step], max_drop: float, *, mixes: bool) -> str:
    first, last = steps[0], steps[-1]
    also = f"; with all layers in f32 but for their weights, {last.value:.4f}" if mixes else ""
    return (
        f"quantized, the model loses too much: {judge.metric} is {first.value:.4f}, and {reference.value:.4f} in f32, "
        f"{first.drop:.4f} less{also}; quantize.max_drop is {max_drop:g}. More or other calibration data, preset: "
        "mixed, fast_bias_correction: false or smooth_quant may help."
    )


# --- which layers of a quantized graph compute in 8 bits, and the same graph with some of them left in f32 --------


_QUANTIZE, _DEQUANTIZE = "quantized_decomposed.quantize_per_", "quantized_decomposed.dequantize_per_"


def layers_of(model: GraphModule) -> list[str]:
    """Returns the names of the nodes that take quantized activations, in their order."""
    return [node.name for node in model.graph.nodes if any(True for _ in _quantized_inputs(node))]


def _quantized_inputs(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields the inputs of a node that are quantized and dequantized again, and what they were before."""
    if node.op != "call_function" or _is(node, _QUANTIZE) or _is(node, _DEQUANTIZE):
        return
    for source in node.all_input_nodes:
        before = source.args[0] if _is(source, _DEQUANTIZE) else None
        if not (isinstance(before, Node) and _is(before, _QUANTIZE)):
            continue
        first = before.args[0]
        # A constant is a weight.
        if isinstance(first, Node) and first.op != "get_attr":
            yield source, first


def _is(node: Node, prefix: str) -> bool:
    return node.op == "call_function" and op_name(node.target).startswith(prefix)


def without(model: GraphModule, names: Collection[str]) -> GraphModule:
    """Returns a model in which some layers take their activations as they are; it shares the weights.

    Args:
        model: A quantized model; stays as it is.
        names: From `layers_of`. Their weights stay in 8 bits, and are dequantized.
    """
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(model.graph, nodes))
    graph._codegen = copy.copy(model.graph._codegen)
    for old, node in list(nodes.items()):
        if old.name in names:
            for source, before in list(_quantized_inputs(node)):
                node.replace_input_with(source, before)
    shortened = GraphModule(model, graph)
    # Not before: whether a module's call has side effects, the module says.
    shortened.graph.eliminate_dead_code()
    shortened.recompile()
    return shortened
