"""Bisection names exactly the faulty operators, for every kind of failure."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openvino as ov
import pytest
import torch
from openvino import opset13 as ops
from torch import nn

import torchserve_openvino as tov
from helpers import break_conversion_of_tanh
from torchserve_openvino.config import resolve_options
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.doctor.bisecting.bisect import Culprits, find_guilty
from torchserve_openvino.doctor.target import SampleCall
from torchserve_openvino.serving.verification.judge import Judge


def find(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **more: Any) -> Culprits:
    found = find_guilty(model, SampleCall(args, {}), resolve_options(options), **more)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.explanation()
    return found


Replace = Callable[[Any], Any]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Replace], None]:
    """Replaces an OpenVINO operation with a wrong one in every converted model."""
    from torchserve_openvino.backend.conversion import convert as stage

    swaps: dict[str, Replace] = {}
    real = stage.fx_to_model

    def sabotaged(*args: Any) -> tuple[ov.Model, Any]:
        model, decoder = real(*args)
        for node in model.get_ordered_ops():
            if (swap := swaps.get(node.get_type_name())) is not None:
                targets = list(node.output(0).get_target_inputs())
                made = swap(node)
                for target in targets:
                    target.replace_source_output(made.output(0))
        model.validate_nodes_and_infer_types()
        return model, decoder

    monkeypatch.setattr(stage, "fx_to_model", sabotaged)
    return swaps.__setitem__


def absolute(node: Any) -> Any:
    return ops.abs(node.input_value(0))


def plus_one(node: Any) -> Any:
    return ops.add(node.output(0), ops.constant(1.0, dtype="float32"))


class Net(nn.Module):
    """Two ReLUs among other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        x = torch.sigmoid(self.second(torch.tanh(x)))
        return torch.relu(x + 10) * 2  # positive inputs: abs instead of relu changes nothing


def test_nothing_wrong() -> None:
    found = find(Net().eval(), torch.randn(2, 8))
    assert (found.kind, found.ops, found.nodes, found.tests) == ("nothing_wrong", (), (), 1)
    assert found.coverage_before == 1.0 and found.difference_before < 1e-4
    assert "Nothing is wrong" in found.explanation()


def test_a_wrong_operator_and_which_of_its_nodes(wrong: Any) -> None:
    wrong("Relu", absolute)
    said: list[str] = []
    found = find(Net().eval(), torch.randn(2, 8), progress=said.append)
    assert (found.kind, found.disabled_ops, found.proven, found.confirmed) == (
        "wrong_answer", ["aten.relu.default"], True, True,
    )  # fmt: skip
    (node,) = found.nodes
    assert (node.name, node.module, node.inputs, found.candidates) == ("relu", "act", ("float32[2, 8]",), 2)
    path, line = node.where.rsplit(":", 1)
    with open(path, encoding="utf-8") as source:
        assert "self.act(self.first(x))" in source.read().splitlines()[int(line) - 1]
    assert found.difference_before > 1e-2 and found.difference_after is not None and found.difference_after < 1e-4
    assert found.coverage_before == 1.0 and found.coverage_after is not None and 0 < found.coverage_after < 1
    text = found.explanation()
    assert "disabled_ops: [aten.relu.default]" in text and "1 of the 2 nodes" in text and node.where in text
    assert any("left out, right" in line for line in said) and any("still wrong" in line for line in said)


@pytest.mark.slow
def test_two_operators_are_wrong(wrong: Any) -> None:
    wrong("Tanh", plus_one)
    wrong("Sigmoid", plus_one)
    found = find(Net().eval(), torch.randn(2, 8))
    assert found.kind == "wrong_answer" and found.confirmed
    assert set(found.ops) == {"aten.tanh.default", "aten.sigmoid.default"}
    assert {node.op for node in found.nodes} == set(found.ops)


def test_errors_that_cancel_are_not_seen_and_do_not_mislead(wrong: Any) -> None:
    wrong("Tanh", plus_one)
    wrong("Sigmoid", lambda node: ops.subtract(node.output(0), ops.constant(1.0, dtype="float32")))
    model = lambda x: torch.tanh(x) + torch.sigmoid(x)
    assert find(model, torch.randn(6)).kind == "nothing_wrong"
    wrong("Relu", plus_one)
    found = find(lambda x: torch.relu(torch.tanh(x) + torch.sigmoid(x)), torch.randn(6))
    assert found.ops == ("aten.relu.default",) and found.confirmed


def test_nan_is_a_wrong_answer(wrong: Any) -> None:
    wrong("Sigmoid", lambda node: ops.sqrt(ops.subtract(node.output(0), ops.constant(2.0, dtype="float32"))))
    found = find(lambda x: torch.sigmoid(x) + torch.tanh(x), torch.randn(6))
    assert found.ops == ("aten.sigmoid.default",)
    assert found.to_dict()["difference_before"] == "inf"


def test_nodes_of_several_graphs_are_told_apart(wrong: Any) -> None:
    wrong("Relu", absolute)

    def model(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x + 10)
        torch._dynamo.graph_break()
        return torch.relu(x - 11)  # the only one that sees a negative number

    found = find(model, torch.linspace(-1, 1, 6))
    (node,) = found.nodes
    with open(node.where.rsplit(":", 1)[0], encoding="utf-8") as source:
        assert "the only one" in source.read().splitlines()[int(node.where.rsplit(":", 1)[1]) - 1]


def test_a_tolerance_decides(wrong: Any) -> None:
    wrong("Sigmoid", lambda node: ops.add(node.output(0), ops.constant(1e-3, dtype="float32")))
    x = torch.randn(6)
    limit = lambda most: Judge("f32", VerifySection(max_abs=most))
    assert find(torch.sigmoid, x, judge=limit(1e-2)).kind == "nothing_wrong"
    assert find(torch.sigmoid, x, judge=Judge("bf16", VerifySection())).kind == "nothing_wrong"
    assert find(torch.sigmoid, x, judge=limit(1e-5)).ops == ("aten.sigmoid.default",)


def test_every_limit_of_verify_decides(wrong: Any) -> None:
    wrong("Relu", absolute)
    x = torch.tensor([1.0, -0.5, 0.25, -2.0])
    wide = VerifySection(max_abs=10.0)
    assert find(torch.relu, x, judge=Judge("f32", wide)).kind == "nothing_wrong"
    for limit in ({"min_cosine": 0.99}, {"min_top1": 1.0}):
        found = find(lambda x: torch.relu(x)[None] + 0, x, judge=Judge("f32", wide.model_copy(update=limit)))
        assert found.ops == ("aten.relu.default",) and found.confirmed
        assert next(iter(limit)) in found.problem


@pytest.mark.parametrize("backend", ["export", "openvino_ts"])
def test_a_failure_of_another_backend_is_found_in_it(backend: str) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + 1 if x.sum() > 0 else torch.relu(x)

    found = find(Branches().eval(), torch.ones(3), backend=backend)
    # Dynamo breaks the graph at the branch; torch.export refuses the whole model.
    assert found.kind == ("not_repaired" if backend == "export" else "nothing_wrong")
    assert ("no graph of the model was captured" in found.cause) == (backend == "export")


def test_a_conversion_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    break_conversion_of_tanh(monkeypatch)
    found = find(Net().eval(), torch.randn(2, 8))
    assert (found.kind, found.ops, found.confirmed) == ("conversion_failed", ("aten.tanh.default",), True)
    assert "No conversion rule" in found.problem
    # Nothing disabled, all disabled, the suspect alone, and the confirmation.
    assert found.tests == 4


def test_a_partition_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchserve_openvino.backend.capture import builder as stage

    real = stage.build

    def failing(model: ov.Model, *args: Any) -> Any:
        if any(node.get_type_name() == "Sigmoid" for node in model.get_ops()):
            raise RuntimeError("the plugin is on strike")
        return real(model, *args)

    monkeypatch.setattr(stage, "build", failing)
    found = find(Net().eval(), torch.randn(2, 8))
    assert (found.kind, found.ops, found.coverage_before) == ("compile_failed", ("aten.sigmoid.default",), 0.0)
    assert "on strike" in found.problem and found.confirmed


def test_a_call_that_fails() -> None:
    def model(index: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return index + 1, torch.sin(torch.tanh(x)) * 2

    # OpenVINO computes int64 in 32 bits, so the partition refuses this input.
    found = find(model, torch.tensor([2**40]), torch.randn(6))
    assert (found.kind, found.ops, found.confirmed) == ("runtime_failed", ("aten.add.Tensor",), True)
    assert "integer input" in found.problem


def test_random_models_and_buffers_are_compared_from_the_same_state(wrong: Any) -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return torch.relu(x + self.calls + torch.rand(3)) + torch.sigmoid(x)

    model = Stateful().eval()
    x = torch.randn(3)
    before = x.clone()
    assert find(model, x).kind == "nothing_wrong"
    wrong("Sigmoid", plus_one)
    assert find(model, x).ops == ("aten.sigmoid.default",)
    # One call of each search changes it: that before the first comparison.
    assert model.calls.eq(2).all() and torch.equal(x, before)


def test_a_model_with_hidden_state_is_said_to_have_it() -> None:
    calls = [0]

    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return torch.relu(x) + calls[0]

    found = find(Hidden().eval(), torch.randn(3))
    assert (found.kind, found.tests) == ("not_repaired", 0)
    assert "state" in found.explanation() and "a different answer each time" in found.explanation()


def test_an_answer_that_no_operator_spoils() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        # Eager and traced code take different branches.
        return torch.relu(x) + (1 if torch.compiler.is_compiling() else 0)

    found = find(model, torch.randn(3))
    assert found.kind == "not_repaired" and found.ops == ()
    assert "aot_eager" in found.explanation()


def test_an_error_of_the_model_itself_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find(nn.Linear(3, 3), torch.randn(2, 5))


def test_options_of_the_user_stay_in_force(wrong: Any) -> None:
    wrong("Relu", absolute)
    found = find(Net().eval(), torch.randn(2, 8), options={"disabled_ops": ["aten.relu"]})
    assert found.kind == "nothing_wrong" and found.coverage_before < 1


def test_a_limit_of_tests_gives_the_best_so_far(wrong: Any) -> None:
    wrong("Tanh", plus_one)
    wrong("Sigmoid", plus_one)
    found = find(Net().eval(), torch.randn(2, 8), max_tests=4)
    assert not found.proven and {"aten.tanh.default", "aten.sigmoid.default"} <= set(found.ops)
    assert "limit" in found.explanation()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Removes the mappings after the test, because they are process-wide."""
    yield
    tov.forget_mappings()


@pytest.mark.usefixtures("forgotten")
def test_a_wrong_mapping_of_the_user() -> None:
    mapping = torch.library.custom_op(
        "bisect_test::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    mapping.register_fake(torch.empty_like)

    @tov.register_op("bisect_test::double")
    def double(x: Any) -> Any:
        return ops.multiply(x, ops.constant(3.0, dtype="float32"))

    found = find(lambda x: torch.relu(torch.ops.bisect_test.double(x)) + 1, torch.rand(4))
    assert found.ops == ("bisect_test.double.default",) and found.confirmed


@pytest.mark.usefixtures("forgotten")
def test_a_wrong_mapping_of_a_module() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    @tov.register_op(Twice)
    def twice(module: nn.Module, x: Any) -> Any:
        return ops.multiply(x, ops.constant(3.0, dtype="float32"))

    found = find(nn.Sequential(nn.Linear(4, 4), Twice(), nn.ReLU()).eval(), torch.randn(2, 4))
    assert found.kind == "wrong_answer" and found.confirmed
    assert "Twice" in found.ops[0] and found.disabled_ops == []
    assert "mapping of that module" in found.explanation() and "disabled_ops" not in found.explanation()
