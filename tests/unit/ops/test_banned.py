"""OpenVINO's raw conversion of each banned operator is still wrong. A failure means upstream fixed it: lift the ban."""

import operator
from typing import Any

import openvino as ov
import pytest
import torch
from openvino.frontend import OpConversionFailure
from torch.fx import Graph, GraphModule

from torchserve_openvino.backend.upstream._openvino_private import core, fx_to_model
from torchserve_openvino.ops.rule_registry import rules_that

NAN, INF = float("nan"), float("inf")
aten = torch.ops.aten
X = torch.tensor([[0.3, -1.2, 2.0], [0.0, 1.5, -0.7]])
INTS = torch.tensor([-7, -1, 0, 3, 12], dtype=torch.int32)
# Banned for data-dependent shapes or complex numbers; these need no example.
BY_NATURE = {
    "aten.nonzero.default", "aten.repeat_interleave.self_Tensor", "aten.where.default",
    "aten.view_as_complex.default", "aten.view_as_real.default",
    "torchvision.nms.default", "openvino_kept.batched_nms.default",
    # OpenVINO has none of them; the rules say which of them are decomposed.
    "aten._fft_r2c.default", "aten._fft_c2c.default", "aten._fft_c2r.default", "aten.view.dtype", "aten.cumprod",
    "aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default", "aten.index_reduce.default",
}  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    "aten.__lshift__.Tensor": (INTS, torch.tensor([32], dtype=torch.int32)),
    "aten.__rshift__.Tensor": (INTS, torch.tensor([32], dtype=torch.int32)),
    "aten._cdist_forward.default": (X, X.flip(0), 1.0, None),
    "aten._native_batch_norm_legit_functional.default": (X, *torch.ones(4, 3), True, 0.1, 1e-5),
    "aten._safe_softmax.default": (torch.full((2, 3), -INF), 1),
    "aten.angle.default": (torch.tensor([NAN, 1.0]),),
    "aten.any.dims": (torch.tensor([[NAN, 0.0], [0.0, 0.0]]), [1]),
    "aten.atan2.default": (torch.tensor([INF, -0.0, -3.0]), torch.tensor([INF, -1.0, -0.0])),
    "aten.bitwise_left_shift.Tensor": (INTS, torch.tensor([32], dtype=torch.int32)),
    "aten.bucketize.Tensor": (torch.tensor([NAN, 1.5]), torch.tensor([0.0, 1.0, 2.0])),
    "aten.clamp.Tensor": (torch.tensor([-3, 0, 3]), torch.tensor(0.5), None),
    "aten.erfinv.default": (torch.tensor([0.999999, -0.999999]),),
    "aten.erfc.default": (torch.tensor([3.0, 3.5]),),
    "aten.expm1.default": (torch.tensor([1e-6, -1e-6, NAN]),),
    "aten.log1p.default": (torch.tensor([1e-6, -1e-6]),),
    "aten.floor_divide.default": (INTS, torch.tensor(4, dtype=torch.int32)),
    "aten.gcd.default": (INTS, torch.tensor(4, dtype=torch.int32)),
    "aten.index_add.default": (X, 1, torch.tensor([0, 0]), torch.ones(2, 2)),
    "aten.index_fill.int_Scalar": (torch.tensor(1.0), 0, torch.tensor([0]), 5),
    "aten.index_fill.int_Tensor": (torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor(5.0)),
    "aten.kthvalue.default": (X, 2),
    "aten.linalg_cross.default": (X, X.flip(0)),
    "aten.log_sigmoid_forward.default": (torch.tensor([-100.0, 1.0]),),
    "aten.logaddexp.default": (torch.tensor([NAN, NAN]), torch.tensor([INF, 0.0])),
    "aten.logsumexp.default": (torch.tensor([[NAN, 1.0], [2.0, 3.0]]), [1]),
    "aten.rot90.default": (X, 4, [0, 1]),
    "aten.searchsorted.Tensor": (torch.tensor([0.0, 1.0, 2.0]), X),
}
# Those for which OpenVINO raises an error, in conversion or because an output has another type or shape.
RAISES = {
    "aten._native_batch_norm_legit_functional.default", "aten.clamp.Tensor", "aten.gcd.default",
    "aten.index_add.default", "aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor", "aten.kthvalue.default",
    "aten.linalg_cross.default", "aten.searchsorted.Tensor",
}  # fmt: skip


def overload(name: str) -> Any:
    _, packet, kind = name.split(".")
    return getattr(getattr(aten, packet), kind)


def raw(op: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the results of OpenVINO's own conversion of one operator, written to prefilled memory."""
    graph = Graph()
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    nodes = [graph.placeholder(f"x{i}") if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]
    node = graph.call_function(op, tuple(nodes))
    several = len(op._schema.returns) > 1
    results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(outputs))] if several else [node]
    graph.output(tuple(results))
    for tensor, placeholder in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        placeholder.meta["val"] = tensor
    shapes, dtypes = [list(x.shape) for x in inputs], [x.dtype for x in inputs]
    model, _decoder = fx_to_model(GraphModule({}, graph), shapes, dtypes)
    for port, tensor in zip(model.inputs, inputs, strict=True):
        port.get_node().set_partial_shape(ov.PartialShape(list(tensor.shape)))
    request = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    request.infer([ov.Tensor(x.contiguous().numpy()) for x in inputs])
    found = []
    for position, wanted in enumerate(outputs):
        answer = torch.full_like(wanted, 1)
        request.set_output_tensor(position, ov.Tensor(answer.numpy(), shared_memory=True))
        found.append(answer)
    request.infer()
    return found


def test_a_right_conversion_is_seen_as_right() -> None:
    for op, args in (aten.relu.default, (X,)), (aten.max.dim, (X, 1)):
        expected = op(*args)
        outputs = list(expected) if isinstance(expected, tuple) else [expected]
        torch.testing.assert_close(raw(op, args, outputs), outputs)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_raw_conversion_is_still_wrong(name: str) -> None:
    op, args = overload(name), CASES[name]
    expected = op(*args)
    outputs = [x for x in (expected if isinstance(expected, tuple) else (expected,)) if x.numel()]
    if name == "aten.log_sigmoid_forward.default":
        # The second output is for the backward pass only.
        del outputs[1:]
    if name in RAISES:
        with pytest.raises((RuntimeError, OpConversionFailure)):
            raw(op, args, outputs)
        return
    answers = raw(op, args, outputs)
    with pytest.raises(AssertionError):
        for got, wanted in zip(answers, outputs, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-9, equal_nan=True)


def test_every_ban_has_its_example_and_no_addition_is_banned() -> None:
    banned = rules_that(lambda rule: bool(rule.banned))
    assert set(banned) == set(CASES) | BY_NATURE
    assert not any(rule.verified for rule in banned.values())
