"""The doctor's advice is verified, and the code that it drafts runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from ill_models import written

import torchserve_openvino as tov
from torchserve_openvino.config import resolve_options
from torchserve_openvino.doctor.diagnose import diagnose
from torchserve_openvino.doctor.diagnosis import Diagnosis, NextStep
from torchserve_openvino.doctor.mapping.formula import formula_for, try_formula
from torchserve_openvino.doctor.mapping.skeletons import as_code, mapping_file, mapping_test, parameters, signature
from torchserve_openvino.doctor.next_steps import Helper, OpSample
from torchserve_openvino.doctor.rewrites import step_for_values, steps_for_break
from torchserve_openvino.doctor.target import SampleCall, Target, TargetSpec, load_target

aten = torch.ops.aten


def steps(ill: Diagnosis, op: str) -> dict[str, NextStep]:
    (refused,) = [each for each in ill.refused if each.op == op]
    return {step.kind: step for step in refused.next_steps}


def test_a_decomposition_that_helps_needs_no_step_it_is_taken(ill: Diagnosis) -> None:
    assert "aten.addmv.default" not in {each.op for each in ill.refused}
    assert "aten.addmv.default" in {each["op"] for each in ill.decomposed}


def test_a_decomposition_that_ends_nowhere_is_not_offered(ill: Diagnosis) -> None:
    # torch decomposes hypot into a primitive that OpenVINO does not support either.
    assert "decomposition" not in steps(ill, "aten.hypot.default")


def test_formulas_come_from_decompositions_and_from_the_operators_own_code(ill: Diagnosis) -> None:
    drafts = {each.op: each for each in ill.drafts()}
    hypot, swishy = drafts["aten.hypot.default"], drafts["illlib.swishy.default"]
    assert "ops.sqrt" in "".join(hypot.body) and hypot.max_abs is not None and hypot.max_abs < 1e-5
    # beta remains a parameter, although it was 2.0 when the operator was traced.
    assert swishy.signature == "x, beta=1.0" and any("constant(beta, x)" in line for line in swishy.body)
    assert swishy.origin == "the operator's own Python code"
    assert drafts["aten._linalg_det.default"].body == []


def test_a_formula_holds_for_other_values_than_those_seen() -> None:
    op, names = aten.leaky_relu.default, ["x", "negative_slope"]
    found = formula_for(op, SampleCall((torch.randn(9), 0.1), {}), names, torch._decomp.decomposition_table, None)
    assert found is not None and "negative_slope" in "".join(found.lines)
    for slope in (0.3, 0.05):
        assert try_formula(found.lines, op, SampleCall((torch.randn(2, 5), slope), {}), names) is not None


def test_a_formula_that_was_written_for_one_integer_refuses_others() -> None:
    op, names = aten.sum.dim_IntList, ["x", "dim", "keepdim", "dtype"]
    found = formula_for(op, SampleCall((torch.rand(3, 4), [1]), {}), names, {}, None)
    assert found is not None and "ops.reduce_sum(x, [1], False)" in "".join(found.lines)
    assert try_formula(found.lines, op, SampleCall((torch.rand(5, 6), [1]), {}), names) is not None
    assert try_formula(found.lines, op, SampleCall((torch.rand(5, 6), [0]), {}), names) is None


def test_a_wrong_formula_is_not_offered() -> None:
    seen = SampleCall((torch.rand(3),), {})
    assert try_formula(["return ops.exp(x)"], aten.exp.default, seen, ["x"]) is not None
    assert try_formula(["return ops.sin(x)"], aten.exp.default, seen, ["x"]) is None
    assert try_formula(["return ops.no_such_operation(x)"], aten.exp.default, seen, ["x"]) is None


def test_schemas_become_python_parameters() -> None:
    assert signature(aten.softplus.default) == "x, beta=1, threshold=20"
    assert signature(aten.add.Tensor) == "x, other, *, alpha=1"
    assert parameters(aten.uniform.default)[1:3] == ["from_", "to"]
    for op in (aten.searchsorted.Tensor, aten.convolution.default, aten._to_copy.default, aten.uniform.default):
        compile(f"def f({signature(op)}): pass", "schema", "exec")


def test_values_become_python_that_makes_the_like() -> None:
    torch.manual_seed(0)
    seen = (
        [torch.randn(2, 3), torch.randint(0, 7, (4,))],
        torch.rand(2) > 0.5,
        1.5,
        float("inf"),
        None,
        torch.ones(1).half(),
    )
    made = eval(as_code(seen), {"torch": torch})
    assert [t.shape for t in made[0]] == [(2, 3), (4,)] and made[0][1].dtype is torch.int64
    assert float(made[0][0].max()) <= float(seen[0][0].max())
    assert made[1].dtype is torch.bool and made[2:5] == (1.5, float("inf"), None) and made[5].dtype is torch.float16


def test_the_draft_is_python_and_names_what_is_open(ill: Diagnosis) -> None:
    text = mapping_file(ill.drafts(), "my_ops")
    compile(text, "my_ops.py", "exec")
    compile(mapping_test(ill.drafts(), "my_ops"), "test_my_ops.py", "exec")
    assert 'NotImplementedError("aten._linalg_det.default: write its formula in my_ops.py")' in text
    assert "import ill_steps" in text and "op_mappings: my_ops.py" in text


@pytest.mark.slow
def test_the_drafts_own_test_passes_where_the_formula_is_known(ill: Diagnosis, ill_folder: Path) -> None:
    drafts = [each for each in ill.drafts() if each.body]
    assert len(drafts) >= 2
    written(ill_folder, "my_ops.py", mapping_file(drafts, "my_ops"))
    test = written(ill_folder, "test_my_ops.py", mapping_test(drafts, "my_ops"))
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(Path(tov.__file__).parents[1])}
    done = subprocess.run(
        command, check=False, cwd=ill_folder, capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(drafts)} passed" in done.stdout


def test_upstream_gets_table_translator_and_layer_test(ill: Diagnosis) -> None:
    step = steps(ill, "aten.hypot.default")["upstream"]
    table, translator, test = step.files.items()
    assert table[0].endswith("op_table.cpp") and '{"aten.hypot.default", op::translate_hypot}' in table[1]
    assert (
        translator[0].endswith("op/hypot.cpp")
        and "OutputVector translate_hypot(const NodeContext& context)" in translator[1]
    )
    assert "context.get_input(1)" in translator[1]
    compile(test[1], test[0], "exec")
    assert "class TestHypot(PytorchLayerTest)" in test[1] and "aten.hypot.default(tensors[0], tensors[1])" in test[1]
    # A user's custom operator does not belong upstream.
    assert "upstream" not in steps(ill, "illlib.swishy.default")


@pytest.mark.parametrize(
    ("body", "title"),
    [
        ("print(x.shape)\n        return x + 1", "remove print or logging calls from forward"),
        ("return x + float(x.sum())", "keep the value in a tensor"),
        ("return x + 1 if x.sum() > 0 else x", "compute both branches, or let torch.cond choose"),
        ("return x[x > 0] + 1", "give the result a fixed shape"),
        ("return outside(x) + 1", "remove torch.compiler.disable"),
        ("torch._dynamo.graph_break()\n        return x + 1", "remove the graph_break() call"),
        (
            "x = x + 1\n        time.sleep(0)\n        return x + 1",
            "replace the call by torch operators, or make it an operator",
        ),
    ],
)
def test_real_graph_breaks_get_the_hint_of_their_cause(tmp_path: Path, body: str, title: str) -> None:
    text = f"""
import time

import torch

@torch.compiler.disable
def outside(x):
    return x * 2

class Breaks(torch.nn.Module):
    def forward(self, x):
        {body}

def model():
    return Breaks(), torch.randn(3)
"""
    found = diagnose(load_target(TargetSpec(written(tmp_path, f"breaks_{abs(hash(body))}.py", text))))
    assert {step.title for each in found.graph_breaks for step in each.next_steps} == {title}, found.graph_breaks
    assert all(each.source for each in found.graph_breaks)


def test_an_unknown_break_still_gets_a_hint() -> None:
    (step,) = steps_for_break("Something new\n  Hint: print it", "y = f(x)")
    assert step.title == "rewrite this line"


def test_causes_in_the_values_are_told_from_those_in_the_operator() -> None:
    step = step_for_values("aten.add.Tensor on torch.float64: OpenVINO does not compute it exactly")
    assert step is not None and step.title == "compute in float32"
    assert step_for_values("OpenVINO has no enabled conversion for aten.bincount.default") is None


def test_a_piece_that_is_too_small_needs_nothing() -> None:
    helper = Helper(Target(torch.nn.ReLU(), SampleCall((), {}), resolve_options(None), "m"))
    sample = OpSample(
        aten.relu.default, SampleCall((torch.ones(1),), {}), [], "tiny_partition", "a piece of 1 light operator"
    )
    (step,) = helper.steps(sample)
    assert step.title.startswith("nothing") and yaml.safe_load(step.yaml)["pt2"]
