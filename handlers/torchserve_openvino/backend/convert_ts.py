"""The third stage's other way: one FX subgraph, traced by TorchScript, to one ov.Model.

OpenVINO's TorchScript frontend has rules of its own, older and in places better than those of its FX frontend. The
subgraph is run once on made-up inputs while TorchScript writes down what runs. Two things stand between the graph and
the tracer. AOTAutograd's names are partly unknown to that frontend, so the operator that they were made of is called
instead. And the tracer takes a size for a plain number wherever it is passed to an operator as such; what takes sizes
goes through torch's own methods, which it sees through, and a size that would be passed elsewhere is refused.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional

from torchserve_openvino.backend._openvino_private import ts_to_model
from torchserve_openvino.backend._torch_private import is_traced
from torchserve_openvino.ops.names import is_symbolic_scalar, op_name, packet_name, value_of
from torchserve_openvino.ops.windows import unfold_by_selection

Call = Callable[..., Any]

_TS_NAME = re.compile(r"\baten::(\w+)")


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, None, None]:
    return torch.layer_norm(x, shape, weight, bias, eps), None, None


def _group_norm(x: Any, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float) -> tuple[Any, ...]:
    return torch.group_norm(x, group, weight, bias, eps), None, None


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple[Any, ...]:
    return torch.batch_norm(x, weight, bias, mean, var, False, momentum, eps, False), None, None


def _attention(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> tuple[Any, None]:
    # The support table lets it through only without dropout.
    return functional.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale), None


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return x.to(dtype or x.dtype, copy=True)


def _copy(x: Any, source: Any, _non_blocking: bool = False) -> Any:
    """The functional copy: the source in the shape and type of what it is written over."""
    return source.to(x.dtype).expand_as(x)


def _sum(x: Any, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Without dimensions all are meant, which that frontend takes for none."""
    return torch.sum(x, dims or list(range(x.dim())), keepdim, dtype=dtype)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


# Overload of a lowered graph -> the operator that OpenVINO's TorchScript frontend knows, and how it is called.
_WHOLE: dict[str, tuple[str, Call]] = {
    "aten.native_layer_norm.default": ("layer_norm", _layer_norm),
    "aten._native_batch_norm_legit_no_training.default": ("batch_norm", _batch_norm),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": ("scaled_dot_product_attention", _attention),
    "aten._softmax.default": ("softmax", lambda x, dim, _half: torch.softmax(x, dim)),
    "aten._log_softmax.default": ("log_softmax", lambda x, dim, _half: torch.log_softmax(x, dim)),
    "aten.log_sigmoid_forward.default": ("log_sigmoid", lambda x: (functional.logsigmoid(x), None)),
    "aten.grid_sampler_2d.default": ("grid_sampler", torch.grid_sampler),
    "aten._adaptive_avg_pool2d.default": ("adaptive_avg_pool2d", functional.adaptive_avg_pool2d),
    "aten._adaptive_avg_pool3d.default": ("adaptive_avg_pool3d", functional.adaptive_avg_pool3d),
    "aten._to_copy.default": ("to", _to_copy),
    "aten.copy.default": ("copy", _copy),
    "aten.sum.default": ("sum", _sum),
    "aten.sum.dim_IntList": ("sum", _sum),
    "aten.unfold.default": ("index_select", unfold_by_selection),
    "aten._unsafe_index.Tensor": ("index", torch.ops.aten.index.Tensor),
}
# The same for operators that take sizes.
_SIZED: dict[str, tuple[str, Call]] = {
    "aten.view.default": ("view", torch.Tensor.view),
    "aten._unsafe_view.default": ("reshape", torch.Tensor.reshape),
    "aten.reshape.default": ("reshape", torch.Tensor.reshape),
    "aten.expand.default": ("expand", torch.Tensor.expand),
    "aten.slice.Tensor": ("slice", _slice),
    "aten.sym_size.int": ("size", torch.Tensor.size),
    "aten.native_group_norm.default": ("group_norm", _group_norm),
}
_CALLED_AS = {name: called for name, (called, _) in (_WHOLE | _SIZED).items()}


class _Replay(Interpreter):
    """Runs a graph the way TorchScript can write it down.

    Attributes:
        missed: Operators that it did not write down, so that their results would become constants. Told afterwards: an
            error in the middle would make Interpreter print the graph, and the tracer fail at its symbolic sizes.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.missed: list[str] = []

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        name = op_name(n.target)
        known = _WHOLE.get(name) or _SIZED.get(name)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call: Any = known[1] if known is not None else n.target
        result = call(*args, **kwargs)
        if any(map(is_traced, (*args, *kwargs.values()))) and not is_traced(result):
            self.missed.append(name)
        return result


class _Traceable(torch.nn.Module):
    def __init__(self, gm: GraphModule) -> None:
        super().__init__()
        self.replay = _Replay(gm)

    def forward(self, *args: Any) -> Any:
        return self.replay.run(*args)


def convert_traced(gm: GraphModule, libraries: Sequence[Path] = ()) -> tuple[ov.Model, Any]:
    """Traces and converts a graph of ATen operators.

    Args:
        gm: Placeholders are the inputs; ``get_attr`` tensors become constants that share the tensors' memory.
        libraries: Extension libraries with conversions of their own.

    Returns:
        The model with its inputs and outputs in the graph's order, and what must live as long as the model.

    Raises:
        RuntimeError: An operator has no conversion, or cannot be traced; the message names it.
    """
    # A call under torch.compile runs with dispatch keys and modes set, under which the tracer misses operators; a new
    # thread has none of them.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_convert, gm, libraries).result()


def _convert(gm: GraphModule, libraries: Sequence[Path]) -> tuple[ov.Model, Any]:
    for node in gm.graph.nodes:
        sized = node.op == "call_function" and any(is_symbolic_scalar(source) for source in node.all_input_nodes)
        if sized and not is_symbolic_scalar(node) and (name := op_name(node.target)) not in _SIZED:
            raise NotImplementedError(f"{name} takes a size, which TorchScript's tracer would keep as a fixed number")
    model = _Traceable(gm)
    with torch.no_grad():
        examples = tuple(_example(value_of(node)) for node in gm.graph.find_nodes(op="placeholder"))
        traced = torch.jit.trace(model, examples, check_trace=False)
        if model.replay.missed:
            raise NotImplementedError(f"TorchScript's tracer did not see {model.replay.missed[0]}")
        return ts_to_model(traced, libraries)


def named_by_torchscript(message: str, ops: Iterable[str]) -> frozenset[str]:
    """Those operators of a subgraph that a message of the TorchScript frontend (``aten::softmax``) speaks of."""
    found = set(_TS_NAME.findall(message))
    return frozenset(op for op in ops if _CALLED_AS.get(op, packet_name(op).partition(".")[2]) in found)


def _example(value: Any) -> torch.Tensor:
    """A tensor of zeros with the shape and strides that tracing saw; sizes are 0-d, so that the tracer follows them."""
    if isinstance(value, torch.Tensor):
        size, stride = [_hint(s) for s in value.shape], [_hint(s) for s in value.stride()]
        return torch.empty_strided(size, stride, dtype=value.dtype).zero_()
    return torch.tensor(_hint(value))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
