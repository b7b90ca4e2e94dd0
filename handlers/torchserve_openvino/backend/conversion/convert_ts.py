"""Third stage, alternative: traces one FX subgraph with TorchScript and converts the trace to one ov.Model.

OpenVINO's TorchScript frontend has conversion rules of its own, older and in places better than those of its FX
frontend. The subgraph runs once on example inputs while TorchScript traces it. The graph needs two adjustments for
the tracer. The frontend does not know all operators that AOTAutograd produces; in place of an unknown one, the operator
that it was lowered from is called. And the tracer records a size that is passed directly to an operator as a constant;
operators that take sizes are therefore called through torch's own methods, which keep sizes symbolic in the trace, and
a size that would reach any other operator is refused.
"""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from torch.fx import GraphModule, Interpreter, Node

from torchserve_openvino.backend.upstream._openvino_private import ts_to_model
from torchserve_openvino.backend.upstream._torch_private import is_traced
from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.names import is_symbolic_scalar, op_name, value_of
from torchserve_openvino.ops.rule_registry import rule_of

_TS_NAME = re.compile(r"\baten::(\w+)")


class _Replay(Interpreter):
    """Runs a graph in a form that TorchScript can trace.

    Attributes:
        missed: Operators that the tracer did not record, so that their results would become constants. Reported after
            the run: an error during it would make Interpreter print the graph, and the tracer fails on the symbolic
            sizes in it.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.missed: list[str] = []

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        name = op_name(n.target)
        traced = rule_of(name).traced
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call: Any = traced.call if traced is not None else n.target
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
        The model, with inputs and outputs in the graph's order, and an object that must live as long as the model.

    Raises:
        RuntimeError: An operator has no conversion, or can't be traced; the message names it.
    """
    # A call under torch.compile runs with dispatch keys and modes set that hide operators from the tracer; a new thread
    # has none of them set.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_convert, gm, libraries).result()


def _convert(gm: GraphModule, libraries: Sequence[Path]) -> tuple[ov.Model, Any]:
    for node in gm.graph.nodes:
        sized = node.op == "call_function" and any(is_symbolic_scalar(source) for source in node.all_input_nodes)
        if not sized or is_symbolic_scalar(node):
            continue
        name = op_name(node.target)
        traced_as = rule_of(name).traced
        if traced_as is None or not traced_as.sized:
            raise NotImplementedError(f"{name} takes a size, which TorchScript's tracer would keep as a fixed number")
    model = _Traceable(gm)
    with torch.no_grad():
        examples = tuple(_example(value_of(node)) for node in gm.graph.find_nodes(op="placeholder"))
        traced = torch.jit.trace(model, examples, check_trace=False)
        if model.replay.missed:
            raise NotImplementedError(f"TorchScript's tracer did not see {model.replay.missed[0]}")
        return ts_to_model(traced, libraries)


def named_by_torchscript(message: str, ops: Iterable[str]) -> frozenset[str]:
    """Returns the operators of a subgraph that a message of the TorchScript frontend names (``aten::softmax``)."""
    names = set(_TS_NAME.findall(message))
    return frozenset(op for op in ops if _name_in_torchscript(op) in names)


def _name_in_torchscript(op: str) -> str:
    traced = rule_of(op).traced
    return traced.name if traced is not None else packet_name(op).partition(".")[2]


def _example(value: Any) -> torch.Tensor:
    """Returns zeros with the traced shape and strides; for a size, a 0-d tensor, which the tracer can follow."""
    if isinstance(value, torch.Tensor):
        size, stride = [_hint(s) for s in value.shape], [_hint(s) for s in value.stride()]
        return torch.empty_strided(size, stride, dtype=value.dtype).zero_()
    return torch.tensor(_hint(value))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
