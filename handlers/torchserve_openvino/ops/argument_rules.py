"""Operators that convert rightly but for some arguments: each rule returns the reason against a node, or None."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torchserve_openvino.ops.division import refuse_quotient
from torchserve_openvino.ops.movement import HANDS_ON
from torchserve_openvino.ops.names import op_name, packet_name, tensors_of, value_of


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _source(node: Node) -> torch.Tensor | None:
    """The fake tensor of a node's first input."""
    tensors = tensors_of(value_of(node.all_input_nodes[0])) if node.all_input_nodes else []
    return tensors[0] if tensors else None


def _integers(node: Node) -> str | None:
    value = _source(node)
    if value is not None and not value.is_floating_point():
        return "computed in integers by OpenVINO where torch goes through floats"
    return None


def _average_pool(node: Node) -> str | None:
    if _argument(node, 4, "ceil_mode", False):
        return "average pooling with ceil_mode: OpenVINO divides the last window by another count than torch"
    return _integers(node)


def _scalar_to_scalar(node: Node) -> str | None:
    value, source = node.meta.get("val"), _source(node)
    if value is not None and source is not None and value.dim() == 0 and source.dim() == 0:
        return "a scalar expanded to a scalar: OpenVINO 2026.4 crashes on it"
    return None


def _known_beforehand(node: Node) -> str | None:
    """OpenVINO drops the abs of a range that it can compute while it compiles (tests/contract pins it)."""
    seen, waiting, ranges = {node}, [node], False
    while waiting:
        found = waiting.pop()
        if found.op in {"placeholder", "get_attr"}:
            return None
        ranges |= packet_name(op_name(found.target)) in {"aten.arange", "aten.linspace"}
        waiting += [source for source in found.all_input_nodes if source not in seen]
        seen.update(found.all_input_nodes)
    return "the abs of a range without inputs, which OpenVINO takes for positive" if ranges else None


def _scatter_sum(node: Node) -> str | None:
    source = _source(node)
    if source is not None and source.dim() == 0:
        return "scatter_add to a scalar fails in OpenVINO"
    if source is not None and source.dtype in {torch.int64, torch.bool}:
        return "a sum of int64 may exceed 32 bits, in which OpenVINO computes it; one of booleans counts"
    return None


def _scatter_reduction(node: Node) -> str | None:
    reduction = node.args[4] if len(node.args) > 4 else node.kwargs.get("reduce")
    if reduction in {"amax", "amin"}:
        return None
    source = _source(node)
    if reduction == "mean" and source is not None and not source.is_floating_point():
        return "the mean of integers: torch rounds it down, OpenVINO towards 0"
    return _scatter_sum(node)


def _sort(node: Node) -> str | None:
    source = _source(node)
    return "sorting a scalar fails in OpenVINO" if source is not None and source.dim() == 0 else None


def _restrided(node: Node) -> str | None:
    """OpenVINO sees the elements of a tensor in order, and none of the memory around them."""
    source = _source(node)
    if source is None:
        return None
    whole = source.is_contiguous() and source.storage_offset() == 0
    if whole and source.untyped_storage().nbytes() == source.numel() * source.element_size():
        return None
    return "as_strided reads memory that is not part of its input"


def _boolean_sum(node: Node) -> str | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype is torch.bool and not node.kwargs.get("alpha", 1):
        return "a sum of booleans with alpha: OpenVINO adds what alpha takes out"
    return None


def _rounds(node: Node) -> str | None:
    """OpenVINO computes narrow floats in wide ones, and drops two casts that cancel out but for their rounding."""
    source, value = _source(node), value_of(node)
    if source is None or not isinstance(value, torch.Tensor) or not _is_narrower(value.dtype, source.dtype):
        return None
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            name, result = packet_name(op_name(user.target)), value_of(user)
            wider = isinstance(result, torch.Tensor) and _is_narrower(value.dtype, result.dtype)
            if name == "aten._to_copy" and wider:
                return f"a cast to {value.dtype} and back: OpenVINO drops the rounding between them"
            if name in HANDS_ON or user.target is operator.getitem:
                seen.add(user)
                waiting.append(user)
    return None


def _other_index_shape(node: Node) -> str | None:
    """Known sizes that differ are made equal by a decomposition."""
    source, index = node.args[0], node.args[2]
    if not (isinstance(source, Node) and isinstance(index, Node) and isinstance(node.args[1], int)):
        return None
    shape, wanted = value_of(source).shape, value_of(index).shape
    dim = node.args[1] % max(len(shape), 1)
    if any(d != dim and str(size) != str(other) for d, (size, other) in enumerate(zip(shape, wanted, strict=False))):
        return "an index of other sizes than the tensor, which are known only at run time"
    return None


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize


ARGUMENT_RULES: dict[str, Callable[[Node], str | None]] = {
    "aten._to_copy.default": _rounds,
    "aten.abs.default": _known_beforehand,
    "aten.add.Tensor": _boolean_sum,
    "aten.as_strided.default": _restrided,
    "aten.as_strided_copy.default": _restrided,
    "aten.avg_pool1d.default": _average_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.avg_pool3d.default": _average_pool,
    "aten.div.Tensor_mode": refuse_quotient,
    "aten.gather.default": _other_index_shape,
    "aten.expand.default": _scalar_to_scalar,
    "aten.remainder.Scalar": refuse_quotient,
    "aten.remainder.Tensor": refuse_quotient,
    "aten.repeat.default": _scalar_to_scalar,
    "aten.scatter_add.default": _scatter_sum,
    "aten.scatter_reduce.two": _scatter_reduction,
    "aten.sort.stable": _sort,
}
