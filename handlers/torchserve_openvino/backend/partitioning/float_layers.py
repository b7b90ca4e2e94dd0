"""Which layers of a quantised graph compute in floats, because their input was not quantised."""

from collections import Counter

from torch.fx import Graph, Node

from torchserve_openvino.ops import moves_only, op_name
from torchserve_openvino.report.kernel_record import quantizes

_DEQUANTIZE = "quantized_decomposed.dequantize_per_"
# Position of the activations among the arguments of layers that have kernels of 8 bits.
_ACTIVATIONS = {
    "aten.convolution.default": 0, "aten.linear.default": 0, "aten.mm.default": 0, "aten.addmm.default": 1,
    "aten.bmm.default": 0, "aten.baddbmm.default": 1, "aten.matmul.default": 0,
}  # fmt: skip


def float_layers(graph: Graph) -> dict[str, int]:
    """Counts the layers whose activations are not quantised, by operator; empty if the graph quantises nothing."""
    named = [(op_name(node.target), node) for node in graph.nodes if node.op == "call_function"]
    if not quantizes(Counter(name for name, _ in named)):
        return {}
    layers = [(name, node.args[_ACTIVATIONS[name]]) for name, node in named if name in _ACTIVATIONS]
    return dict(Counter(name for name, activations in layers if not _is_dequantized(activations)))


def _is_dequantized(value: object) -> bool:
    """Looks through operators that leave values as they are."""
    while isinstance(value, Node) and value.op == "call_function":
        name = op_name(value.target)
        if name.startswith(_DEQUANTIZE):
            return True
        if not moves_only(name) or not value.args:
            return False
        value = value.args[0]
    return False
