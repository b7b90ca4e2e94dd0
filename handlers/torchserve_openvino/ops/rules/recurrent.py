"""nn.LSTM, nn.GRU and nn.RNN as OpenVINO's sequence operators: one operation per layer and direction, of any length.

Formulas: those of torch's documentation of the modules. OpenVINO orders the gates differently (its specification of
LSTMSequence-5: f, i, c, o; of GRUSequence-5: z, r, h), so the rows of the weights are reordered while it compiles.
torch's GRU multiplies by the reset gate after the hidden state's matrix: ``linear_before_reset``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from openvino import Model, Output, PartialShape
from openvino import opset15 as ops
from torch.fx import Node

from torchserve_openvino.ops.names import tensors_of, value_of
from torchserve_openvino.ops.openvino_values import int64
from torchserve_openvino.ops.rule_registry import Rule, declare

aten = torch.ops.aten
# Positions of torch's gates (LSTM: i, f, g, o; GRU: r, z, n) in OpenVINO's order.
_LSTM_GATES = (1, 0, 2, 3)
_GRU_GATES = (1, 0, 2)
# Builds one layer and direction: sequence [batch, length, features], states [batch, hidden], weights, whether backward
# -> outputs [batch, length, hidden], last states.
Layer = Callable[[Output, Sequence[Output], "Weights", bool], tuple[Output, list[Output]]]


class Weights:
    """The weights of one layer and direction.

    Attributes:
        w: ``[gates * hidden, features]``.
        r: ``[gates * hidden, hidden]``, or of the projected size.
        biases: Two of ``[gates * hidden]``, for the input and for the hidden state; zeros if the layer has none.
        projection: ``[projected, hidden]``, or None.
    """

    def __init__(self, params: Sequence[Output], has_biases: bool) -> None:
        self.w, self.r = params[:2]
        if has_biases:
            self.biases = (params[2], params[3])
        else:
            zeros = ops.constant(0.0, dtype=self.w.get_element_type())
            none = ops.broadcast(zeros, int64([_rows(self.w)])).output(0)
            self.biases = (none, none)
        rest = params[4 if has_biases else 2 :]
        self.projection = rest[0] if rest else None


def _rows(weight: Output) -> int:
    return int(weight.get_partial_shape()[0].get_length())


def _reordered(weight: Output, order: Sequence[int]) -> Output:
    """Reorders blocks of rows, and adds a first dimension for the direction."""
    rows = np.arange(_rows(weight)).reshape(len(order), -1)[list(order)].reshape(-1)
    gathered = ops.gather(weight, int64(list(rows)), int64(0))
    return ops.unsqueeze(gathered, int64([0])).output(0)


def _lengths(x: Output) -> Output:
    """Returns the length of each sequence in the batch: always the full length."""
    shape = ops.shape_of(x)
    batch, length = (ops.gather(shape, int64([axis]), int64(0)) for axis in (0, 1))
    return ops.broadcast(length, batch).output(0)


def _direction(backward: bool) -> str:
    return "REVERSE" if backward else "FORWARD"


def _with_direction(state: Output) -> Output:
    return ops.unsqueeze(state, int64([1])).output(0)


def _results(sequence: Any) -> tuple[Output, list[Output]]:
    squeezed = [ops.squeeze(output, int64([1])).output(0) for output in sequence.outputs()]
    return squeezed[0], squeezed[1:]


def _lstm_layer(x: Output, states: Sequence[Output], weights: Weights, backward: bool) -> tuple[Output, list[Output]]:
    if weights.projection is not None:
        return _projected_layer(x, states, weights, backward)
    bias = ops.add(*weights.biases).output(0)
    hidden, cell = map(_with_direction, states)
    w, r, b = (_reordered(weight, _LSTM_GATES) for weight in (weights.w, weights.r, bias))
    return _results(
        ops.lstm_sequence(x, hidden, cell, _lengths(x), w, r, b, _rows(weights.w) // 4, _direction(backward))
    )


def _gru_layer(x: Output, states: Sequence[Output], weights: Weights, backward: bool) -> tuple[Output, list[Output]]:
    size = _rows(weights.w) // 3
    both = _reordered(ops.add(*weights.biases).output(0), _GRU_GATES)
    # The reset and update gates take the sum of both biases, the new gate takes them separately.
    gates = ops.gather(both, int64(list(range(2 * size))), int64(1))
    last = [
        ops.unsqueeze(ops.gather(bias, int64(list(range(2 * size, 3 * size))), int64(0)), int64([0]))
        for bias in weights.biases
    ]
    w, r = (_reordered(weight, _GRU_GATES) for weight in (weights.w, weights.r))
    bias = ops.concat([gates, *last], 1)
    return _results(
        ops.gru_sequence(
            x, _with_direction(states[0]), _lengths(x), w, r, bias, size, _direction(backward), linear_before_reset=True
        )
    )


def _tanh_layer(x: Output, states: Sequence[Output], weights: Weights, backward: bool) -> tuple[Output, list[Output]]:
    bias = ops.add(*weights.biases).output(0)
    w, r, b = (_reordered(weight, (0,)) for weight in (weights.w, weights.r, bias))
    state, lengths = _with_direction(states[0]), _lengths(x)
    return _results(ops.rnn_sequence(x, state, lengths, w, r, b, _rows(weights.w), _direction(backward), ["tanh"]))


def _relu_layer(x: Output, states: Sequence[Output], weights: Weights, backward: bool) -> tuple[Output, list[Output]]:
    """Builds the layer step by step, since OpenVINO's own relu takes NaN for 0."""

    def step(gates: Output, states: Sequence[Output]) -> list[Output]:
        zero = ops.constant(0.0, dtype=gates.get_element_type())
        return [ops.select(ops.less(gates, zero), zero, gates).output(0)]

    return _loop(x, states, weights, backward, step)


def _projected_layer(
    x: Output, states: Sequence[Output], weights: Weights, backward: bool
) -> tuple[Output, list[Output]]:
    """Builds an LSTM with a projected hidden state, for which OpenVINO has no operator."""

    def step(gates: Output, states: Sequence[Output]) -> list[Output]:
        i, f, g, o = ops.split(gates, int64(1), 4).outputs()
        cell = ops.add(ops.multiply(ops.sigmoid(f), states[1]), ops.multiply(ops.sigmoid(i), ops.tanh(g)))
        return [ops.multiply(ops.sigmoid(o), ops.tanh(cell)).output(0), cell.output(0)]

    return _loop(x, states, weights, backward, step)


def _loop(
    x: Output,
    states: Sequence[Output],
    weights: Weights,
    backward: bool,
    step: Callable[[Output, Sequence[Output]], list[Output]],
) -> tuple[Output, list[Output]]:
    """Builds a layer and direction step by step, where no sequence operator computes it.

    Args:
        step: Maps the gates' pre-activations and the states to new states, the first of which is not yet projected.
    """
    gates = ops.add(ops.matmul(x, weights.w, False, True), ops.add(*weights.biases)).output(0)
    kind = x.get_element_type()
    batch = x.get_partial_shape()[0]
    part = ops.parameter(PartialShape([batch, 1, _rows(weights.w)]), kind)
    before = [ops.parameter(PartialShape([batch, state.get_partial_shape()[1]]), kind) for state in states]
    matrices = [weights.r] if weights.projection is None else [weights.r, weights.projection]
    constants = [ops.parameter(matrix.get_partial_shape(), kind) for matrix in matrices]
    recurrent = ops.matmul(before[0], constants[0], False, True)
    total = ops.add(ops.squeeze(part, int64([1])), recurrent).output(0)
    after = step(total, [state.output(0) for state in before])
    if weights.projection is not None:
        after[0] = ops.matmul(after[0], constants[1], False, True).output(0)
    output = ops.unsqueeze(after[0], int64([1])).output(0)

    loop = ops.tensor_iterator()
    loop.set_body(Model([output, *after], [part, *before, *constants]))
    start, stride, end = (-1, -1, 0) if backward else (0, 1, -1)
    loop.set_sliced_input(part, gates, start, stride, 1, end, 1)
    for old, initial, new in zip(before, states, after, strict=True):
        loop.set_merged_input(old, initial, new)
    for parameter, matrix in zip(constants, matrices, strict=True):
        loop.set_invariant_input(parameter, matrix)
    every = loop.get_concatenated_slices(output, start, stride, 1, end, 1)
    return every, [loop.get_iter_value(state, -1) for state in after]


def _stacked(
    layer: Layer,
    x: Output,
    states: Sequence[Output],
    params: Sequence[Output],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Output, ...]:
    """Stacks layers and directions; returns the outputs of the last layer, and the last states of all layers.

    Args:
        states: Each ``[layers * directions, batch, hidden]``.
        params: The weights of each layer and direction in turn.
    """
    swap = int64([1, 0, 2])
    current = x if batch_first else ops.transpose(x, swap).output(0)
    directions = 2 if bidirectional else 1
    per_direction = len(params) // (num_layers * directions)
    last: list[list[Output]] = [[] for _ in states]
    for depth in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = depth * directions + direction
            weights = Weights(params[index * per_direction : (index + 1) * per_direction], has_biases)
            start = [ops.gather(state, int64(index), int64(0)).output(0) for state in states]
            output, ended = layer(current, start, weights, direction == 1)
            outputs.append(output)
            for parts, state in zip(last, ended, strict=True):
                parts.append(ops.unsqueeze(state, int64([0])).output(0))
        current = ops.concat(outputs, 2).output(0) if bidirectional else outputs[0]
    answer = current if batch_first else ops.transpose(current, swap).output(0)
    return answer, *(ops.concat(parts, 0).output(0) for parts in last)


def _lstm(
    x: Output,
    hx: Sequence[Output],
    params: Sequence[Output],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Output, ...]:
    return _stacked(_lstm_layer, x, hx, params, has_biases, num_layers, bidirectional, batch_first)


def _of_one_state(layer: Layer) -> Callable[..., tuple[Output, ...]]:
    def convert(
        x: Output,
        hx: Output,
        params: Sequence[Output],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Output, ...]:
        return _stacked(layer, x, [hx], params, has_biases, num_layers, bidirectional, batch_first)

    return convert


def _not_alike(node: Node) -> str | None:
    """Returns why a recurrent layer is not converted (active dropout, or tensors of several dtypes), or None."""
    if _drops_out(node):
        return "dropout between recurrent layers draws random numbers: torch's own generator must decide them"
    kinds = {tensor.dtype for source in node.all_input_nodes for tensor in tensors_of(value_of(source))}
    return "a recurrent layer whose tensors have several types" if len(kinds) > 1 else None


def _drops_out(node: Node) -> bool:
    """Returns whether a recurrent layer is called in training mode with dropout between its layers."""
    _, _, _, _, layers, dropout, train, *_ = node.args
    return bool(train and dropout != 0 and layers != 1)


_RULE = Rule(limit=_not_alike, draws=_drops_out)
declare(replace(_RULE, convert=_lstm), aten.lstm.input)
declare(replace(_RULE, convert=_of_one_state(_gru_layer)), aten.gru.input)
declare(replace(_RULE, convert=_of_one_state(_tanh_layer)), aten.rnn_tanh.input)
declare(replace(_RULE, convert=_of_one_state(_relu_layer)), aten.rnn_relu.input)
