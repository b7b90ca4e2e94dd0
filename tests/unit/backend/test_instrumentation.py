"""The backend's hooks for a diagnosis."""

from typing import Any

import torch
from torch import nn

from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.ops import op_name


def test_a_node_can_be_left_out_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
    names: list[str] = []

    def leave_out(node: Any) -> str | None:
        names.append(node.name)
        return "suspected" if node.name == "relu_1" else None

    compiled = compile_with(model, CompileSpec(instrumentation=Instrumentation(leave_out=leave_out)))
    x = torch.randn(2, 4)
    with torch.inference_mode():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    (left,) = compiled.report.fallbacks
    assert (left.kind, left.op, left.reason, left.count) == ("disabled_op", "aten.relu.default", "suspected", 1)
    assert "relu" in names


def test_what_was_built_is_shown() -> None:
    seen: list[Observation] = []
    compiled = compile_with(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(),
        CompileSpec(options={"disabled_ops": ["aten.relu"]}, instrumentation=Instrumentation(observe=seen.append)),
    )
    with torch.inference_mode():
        compiled(torch.randn(2, 4))
    (observation,) = seen
    assert "aten.relu.default" in {op_name(node.target) for node in observation.lowered.graph.nodes}
    assert observation.calls
    assert list(observation.calls) == [part.name for part in observation.partitioned.parts]
    assert all(call.compiled is not None for call in observation.calls.values())
    assert observation.record.left_out == {"aten.relu.default": 1}


def test_each_call_of_a_graph_is_shown_with_its_arguments() -> None:
    seen: list[tuple[Observation, list[Any]]] = []
    model = nn.Linear(4, 4).eval()
    compiled = compile_with(
        model, CompileSpec(instrumentation=Instrumentation(called=lambda graph, args: seen.append((graph, list(args)))))
    )
    x = torch.randn(2, 4)
    with torch.inference_mode():
        compiled(x)
        compiled(x)
    (first, args), (second, _) = seen
    assert first is second
    assert len(args) == len(first.lowered.graph.find_nodes(op="placeholder"))
    assert any(torch.equal(arg, model.weight) for arg in args)
