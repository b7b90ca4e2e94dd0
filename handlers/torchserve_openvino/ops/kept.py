"""Keeps operators whole that torch decomposes before any backend sees them.

torch's tracer unrolls a recurrent layer step by step. While one of our models is traced, each such operator is
replaced by a stand-in with the same arguments that torch cannot decompose (`STAND_INS`). `restore` puts the operator
itself back into the lowered graph, so that all later stages see torch's own name.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

aten = torch.ops.aten
_LIBRARY = torch.library.Library("openvino_kept", "DEF")
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)


def _outputs(
    x: Tensor, states: list[Tensor], params: list[Tensor], layers: int, both: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Returns new tensors with the shapes and strides of torch's outputs."""
    rows, columns = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    features = states[0].shape[2] * (2 if both else 1)
    y = x.new_empty([rows, columns, features])
    return y.transpose(0, 1) if batch_first else y, *(x.new_empty(state.shape) for state in states)


def _fake_lstm(
    x: Tensor, hx: list[Tensor], params: list[Tensor], biases: bool, layers: int, dropout: float, train: bool,
    both: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _outputs(x, hx, params, layers, both, batch_first)


def _fake_rnn(
    x: Tensor, hx: Tensor, params: list[Tensor], biases: bool, layers: int, dropout: float, train: bool, both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _outputs(x, [hx], params, layers, both, batch_first)


def _define(op: Any, states: str, count: int, fake: Any) -> Any:
    """Defines a stand-in: a single operator that runs torch's own."""
    name = str(op).split(".")[1]
    returned = ", ".join(["Tensor"] * count)
    _LIBRARY.define(
        f"{name}(Tensor input, {states} hx, {_ARGUMENTS}) -> ({returned})",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    def run(*args: Any) -> Any:
        # One of the operator's outputs may be a view of another, which a custom operator must not return.
        return tuple(each.clone() for each in op(*args))

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openvino_kept::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.openvino_kept, name).default


def _without_idle_dropout(stand_in: Any) -> Any:
    """Wraps a stand-in so that dropout, which may be a symbol, counts in training mode only."""

    def call(x: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
             bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
        probability = float(dropout) if train else 0.0
        return stand_in(x, hx, params, has_biases, num_layers, probability, train, bidirectional, batch_first)

    return call


_KEPT: dict[Any, Any] = {
    aten.lstm.input: _define(aten.lstm.input, "Tensor[]", 3, _fake_lstm),
    aten.gru.input: _define(aten.gru.input, "Tensor", 2, _fake_rnn),
    aten.rnn_tanh.input: _define(aten.rnn_tanh.input, "Tensor", 2, _fake_rnn),
    aten.rnn_relu.input: _define(aten.rnn_relu.input, "Tensor", 2, _fake_rnn),
}
# Maps each operator to the function that is traced in its place.
STAND_INS = {op: _without_idle_dropout(stand_in) for op, stand_in in _KEPT.items()}
_ORIGINALS = {stand_in: op for op, stand_in in _KEPT.items()}


def restore(graph: Graph) -> None:
    """Puts torch's operators back in place of their stand-ins."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ORIGINALS:
            node.target = _ORIGINALS[node.target]
