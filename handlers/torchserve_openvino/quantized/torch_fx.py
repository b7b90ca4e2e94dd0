"""Models that torch.ao quantized by FX, in the operators that OpenVINO converts.

Such a model computes on quantized tensors, which Dynamo can't trace, with weights that are packed for another library.
Its twin has the same layers in plain tensors: each takes dequantized inputs, computes in floats, and quantizes its
result, which OpenVINO turns into kernels of 8 bits. A result that lies halfway between two integers may become either.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.ao.nn import intrinsic
from torch.ao.nn import quantized as nnq
from torch.fx import Graph, GraphModule, Node

F = nn.functional
_RANGES = {torch.quint8: (0, 255, torch.uint8), torch.qint8: (-128, 127, torch.int8)}
_CONVOLUTIONS: Mapping[type, tuple[Any, bool]] = {
    nnq.Conv1d: (F.conv1d, False),
    nnq.Conv2d: (F.conv2d, False),
    nnq.Conv3d: (F.conv3d, False),
    intrinsic.quantized.ConvReLU1d: (F.conv1d, True),
    intrinsic.quantized.ConvReLU2d: (F.conv2d, True),
    intrinsic.quantized.ConvReLU3d: (F.conv3d, True),
}
_LINEARS: Mapping[type, bool] = {nnq.Linear: False, intrinsic.quantized.LinearReLU: True}
_ops = torch.ops.quantized
_BINARY: Mapping[Any, tuple[Callable[..., Any], bool]] = {
    _ops.add: (torch.add, False), _ops.add_relu: (torch.add, True),
    _ops.mul: (torch.mul, False), _ops.mul_relu: (torch.mul, True),
}  # fmt: skip
# Their results have the scale of their input.
_KEEP_SCALE = {
    F.max_pool1d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.relu, torch.relu, torch.flatten, torch.mean,
    torch.max_pool2d, torch.reshape, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze, torch.clamp,
    F.interpolate, F.relu6, F.hardtanh, F.dropout,
}  # fmt: skip
_KEEP_SCALE_METHODS = {
    "flatten", "reshape", "view", "mean", "transpose", "permute", "squeeze", "unsqueeze", "contiguous", "relu", "clamp",
}  # fmt: skip
_KEEP_SCALE_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout,
)  # fmt: skip


@dataclass(frozen=True)
class _Value:
    """What a node of the original graph became.

    Attributes:
        node: A float tensor, or whatever else the node is.
        scale: Scale, zero point and type, if the original is a quantized tensor; ``node`` is then dequantized.
    """

    node: Any
    scale: tuple[float, int, torch.dtype] | None = None


class UnknownLayerError(Exception):
    """A model has a layer for which there is no twin."""


def is_quantized_by_fx(model: Any) -> TypeGuard[GraphModule]:
    """Whether a model is one that `torch.ao.quantization.quantize_fx.convert_fx` made."""
    kinds = (*_CONVOLUTIONS, *_LINEARS)
    return isinstance(model, GraphModule) and any(type(module) in kinds for module in model.modules())


def decomposed(model: GraphModule) -> GraphModule:
    """Returns the twin of a model that `is_quantized_by_fx`.

    Raises:
        UnknownLayerError: It has a layer that is not known here.
    """
    return _Decomposition(model).run()


class _Decomposition:
    def __init__(self, model: GraphModule) -> None:
        self._model, self._graph = model, Graph()
        self._root: dict[str, Any] = {}
        self._values: dict[Node, _Value] = {}

    def run(self) -> GraphModule:
        for node in self._model.graph.nodes:
            self._values[node] = self._value(node)
        self._graph._codegen = self._model.graph._codegen
        decomposed = GraphModule({**dict(self._model.named_modules()), **self._root}, self._graph)
        return decomposed.eval()

    # --- nodes ------------------------------------------------------------------------------------------------

    def _value(self, node: Node) -> _Value:
        match node.op:
            case "placeholder":
                return _Value(self._graph.node_copy(node, self._of))
            case "get_attr":
                return _Value(self._attribute(node))
            case "output":
                if any(self._values[source].scale is not None for source in node.all_input_nodes):
                    raise UnknownLayerError("the model returns quantized tensors")
                return _Value(self._graph.node_copy(node, self._of))
            case "call_module":
                return self._module(node, self._model.get_submodule(str(node.target)))
            case _:
                return self._call(node)

    def _of(self, node: Node) -> Any:
        return self._values[node].node

    def _attribute(self, node: Node) -> Any:
        attribute: Any = self._model
        for name in str(node.target).split("."):
            attribute = getattr(attribute, name)
        name = str(node.target).replace(".", "_")
        self._root[name] = attribute
        return self._graph.get_attr(name)

    def _number(self, argument: Any) -> Any:
        """Returns a number that the original graph holds as a buffer."""
        if not isinstance(argument, Node):
            return argument
        attribute: Any = self._model
        for name in str(argument.target).split("."):
            attribute = getattr(attribute, name)
        return attribute.item()

    def _module(self, node: Node, module: nn.Module) -> _Value:
        source = self._values[node.args[0]]  # type: ignore[index]
        if type(module) in _CONVOLUTIONS and source.scale is not None:
            call, relu = _CONVOLUTIONS[type(module)]
            return self._convolution(node, module, source, call, relu)
        if type(module) in _LINEARS and source.scale is not None:
            weight, bias = self._weight(node.name, module)
            product = self._graph.call_function(F.linear, (source.node, weight, bias))
            return self._requantized(product, module, relu=_LINEARS[type(module)])
        if isinstance(module, nnq.Quantize):
            return self._quantized(source.node, float(module.scale), int(module.zero_point), module.dtype)
        if isinstance(module, nnq.DeQuantize):
            return _Value(source.node)
        if source.scale is None and not type(module).__module__.startswith("torch.ao."):
            return _Value(self._graph.node_copy(node, self._of))
        if isinstance(module, _KEEP_SCALE_MODULES):
            return self._quantized(self._graph.node_copy(node, self._of), *source.scale)  # type: ignore[misc]
        raise UnknownLayerError(f"{node.target} is a {type(module).__name__}")

    def _call(self, node: Node) -> _Value:
        target = node.target
        if target is torch.quantize_per_tensor:
            x, scale, zero, dtype = node.args
            return self._quantized(self._of(x), self._number(scale), self._number(zero), dtype)  # type: ignore[arg-type]
        if target in {"dequantize", torch.dequantize}:
            return _Value(self._of(node.args[0]))  # type: ignore[arg-type]
        packet = getattr(target, "overloadpacket", target)
        if packet in _BINARY:
            call, relu = _BINARY[packet]
            return self._binary(node, call, relu)
        if packet is _ops.cat:
            arguments: list[Any] = [*node.args, *node.kwargs.values()]
            if len(arguments) < 4:
                raise UnknownLayerError(f"{node.name} joins tensors without a scale")
            parts, axis, scale, zero = arguments[:4]
            joined = self._graph.call_function(torch.cat, ([self._of(part) for part in parts], axis))
            return self._quantized(joined, self._number(scale), self._number(zero), torch.quint8)
        scales = {self._values[source].scale for source in node.all_input_nodes}
        copied = self._graph.node_copy(node, self._of)
        if scales <= {None}:
            if str(packet).startswith("quantized."):
                raise UnknownLayerError(f"{node.name} is {packet}")
            return _Value(copied)
        keeps = target in _KEEP_SCALE or (node.op == "call_method" and target in _KEEP_SCALE_METHODS)
        if not keeps or len(scales - {None}) != 1:
            raise UnknownLayerError(f"{node.name} computes {target} on quantized tensors")
        return self._quantized(copied, *next(scale for scale in scales if scale is not None))

    def _binary(self, node: Node, call: Callable[..., Any], relu: bool) -> _Value:
        if len(node.args) != 4:
            # With a number, which has no scale of its own.
            raise UnknownLayerError(f"{node.name} is {node.target} with a number")
        x, y, scale, zero = node.args
        left, right = (self._values[operand] if isinstance(operand, Node) else _Value(operand) for operand in (x, y))
        result = self._graph.call_function(call, (left.node, right.node))
        if relu:
            result = self._graph.call_function(torch.relu, (result,))
        dtype = next(operand.scale[2] for operand in (left, right) if operand.scale is not None)
        return self._quantized(result, self._number(scale), self._number(zero), dtype)

    # --- layers -----------------------------------------------------------------------------------------------

    def _convolution(self, node: Node, module: Any, source: _Value, call: Any, relu: bool) -> _Value:
        weight, bias = self._weight(node.name, module)
        x, padding = source.node, module.padding
        if module.padding_mode != "zeros":
            pads = [size for size in reversed(module.padding) for _ in range(2)]
            x, padding = self._graph.call_function(F.pad, (x, pads, module.padding_mode)), 0
        convolved = self._graph.call_function(
            call, (x, weight, bias, module.stride, padding, module.dilation, module.groups)
        )  # fmt: skip
        return self._requantized(convolved, module, relu=relu)

    def _weight(self, name: str, module: Any) -> tuple[Node, Node | None]:
        """Returns a layer's weight, dequantized from 8 bits, and its bias."""
        packed, bias = module.weight(), module.bias()
        axis = packed.q_per_channel_axis() if packed.qscheme() != torch.per_tensor_affine else None
        low, high, dtype = _RANGES[packed.dtype]
        values = self._constant(f"{name}_weight", packed.int_repr())
        if axis is None:
            steps: tuple[Any, ...] = (packed.q_scale(), packed.q_zero_point())
            operator: Any = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        else:
            scales = self._constant(f"{name}_scales", packed.q_per_channel_scales().float())
            steps = (scales, self._constant(f"{name}_zeros", packed.q_per_channel_zero_points().long()), axis)
            operator = torch.ops.quantized_decomposed.dequantize_per_channel.default
        weight = self._graph.call_function(operator, (values, *steps, low, high, dtype))
        return weight, self._constant(f"{name}_bias", bias.detach()) if bias is not None else None

    def _constant(self, name: str, value: torch.Tensor) -> Node:
        self._root[name] = nn.Buffer(value.contiguous())
        return self._graph.get_attr(name)

    def _requantized(self, x: Node, module: Any, *, relu: bool) -> _Value:
        if relu:
            x = self._graph.call_function(torch.relu, (x,))
        return self._quantized(x, float(module.scale), int(module.zero_point), torch.quint8)

    def _quantized(self, x: Node, scale: float, zero: int, dtype: torch.dtype) -> _Value:
        if dtype not in _RANGES:
            raise UnknownLayerError(f"{x.name} is quantized to {dtype}")
        low, high, plain = _RANGES[dtype]
        forward, back = (
            torch.ops.quantized_decomposed.quantize_per_tensor.default,
            torch.ops.quantized_decomposed.dequantize_per_tensor.default,
        )
        integers = self._graph.call_function(forward, (x, scale, zero, low, high, plain))
        return _Value(self._graph.call_function(back, (integers, scale, zero, low, high, plain)), (scale, zero, dtype))
