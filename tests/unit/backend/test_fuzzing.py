"""The fuzzer itself: reproducible programs that run in eager, comparison with eager, and shrinking of failures."""

import ast
import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import openvino as ov
import pytest
import torch

from fuzzing import modes
from fuzzing.context import plain_cond
from fuzzing.cost import cost_of
from fuzzing.describe import describe
from fuzzing.draft import Val
from fuzzing.generate import generate
from fuzzing.judge import MADE_NAN, difference, noise_of
from fuzzing.model_faults import (
    add_row_to_scores,
    before_compiling,
    bound_pools,
    clear_closed_rows,
    select_behind_products,
)
from fuzzing.observe import Observation, observe
from fuzzing.program import Input, Line, Mode, Program
from fuzzing.real_context import MAX_SECONDS
from fuzzing.registry import BLOCKS, ENTRIES
from fuzzing.run import Result, module_of, run
from fuzzing.script import script
from fuzzing.shrink import shrink
from fuzzing.values import arguments


def test_there_are_more_than_120_operators_and_most_are_drawn_soon() -> None:
    drawn = Counter(line.op for index in range(150) for line in generate(11, index).lines)
    assert len(ENTRIES) > 120
    assert len(drawn) > 0.75 * len(ENTRIES)


@pytest.mark.parametrize("index", [0, 17, 40])
def test_a_program_is_the_same_whatever_came_before(index: int) -> None:
    first = generate(3, index)
    generate(3, index + 1)
    assert generate(3, index) == first
    assert Program.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_programs_run_in_eager() -> None:
    for index in range(40):
        program = modes.changed(generate(5, index), modes.parse("no_grad,eval"))
        with torch.no_grad():
            module_of(program)(*arguments(program, "A", False))
        assert 3 <= len(program.lines) <= 25
        compile(script(program, "title"), "<script>", "exec")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast' is none of"):
        modes.parse("openvino,fast")


def _seen(answer: object, *inputs: torch.Tensor) -> Observation:
    return observe(answer, torch.nn.Module(), [f"x{i}" for i in range(len(inputs))], list(inputs), False)


def test_what_counts_as_a_difference() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    eager = _seen((x[0], 2), x)
    assert difference(_seen((x[0], 2), x), eager, {}) == ("", "")
    assert difference(_seen((x[0], 3), x), eager, {})[0] == "structure"
    assert difference(_seen((x[0].clone(), 2), x), eager, {})[0] == "alias"
    assert difference(_seen((x[0] + 1, 2), x), eager, {})[0] == "value"
    assert difference(_seen((x[0].double(), 2), x), eager, {})[0] == "dtype"
    assert difference(_seen((x[0], 2), x + 1), eager, {})[0] == "effect"
    assert difference(_seen(x.t().contiguous().t()), _seen(x.clone()), {})[0] == "stride"


def test_what_disturbance_moves_is_not_compared_closely() -> None:
    clean, near = _seen(torch.tensor([1.0, 2.0])), _seen(torch.tensor([1.0, 2.01]))
    off = _seen(torch.tensor([1.0, 2.05]))
    assert difference(off, clean, {})[0] == "value"
    assert difference(off, clean, noise_of(clean, [near])) == ("", "")


def test_a_failure_becomes_small() -> None:
    program = next(
        p for p in (generate(2, i) for i in range(400)) if len(p.lines) > 8 and any(x.op == "softmax" for x in p.lines)
    )

    def ask(task: dict) -> dict:
        candidate = Program.from_dict(task["program"])
        if task.get("describe"):
            return {"outcome": "described", "values": describe(candidate)}
        fails = any(line.op == "softmax" for line in candidate.lines)
        return {"outcome": "failed" if fails else "ok", "kind": "value" if fails else "", "detail": "", "step": 0}

    wanted = program.lines[next(i for i, x in enumerate(program.lines) if x.op == "softmax")].out[0]
    program = Program(**{**vars(program), "returns": (wanted, *program.returns)})
    small = shrink(program, ask({"program": program.to_dict()}), ask, {}, 30.0)
    assert len([line for line in small.lines if not line.writes and line.out]) <= 2
    assert small.mode.steps == "A" and not small.mode.frozen


@pytest.fixture(scope="module")
def real_programs() -> list[Program]:
    return [modes.generated(9, index, modes.parse("real_sizes")) for index in range(60)]


def test_programs_of_real_sizes_have_the_sizes_and_the_blocks_that_users_have(real_programs: list[Program]) -> None:
    drawn = Counter(line.op for program in real_programs for line in program.lines if line.op in BLOCKS)
    assert len(BLOCKS) > 30
    assert len(drawn) > 0.7 * len(BLOCKS)
    sizes = {size for program in real_programs for size in program.sizes_of("A").values()}
    assert max(sizes) >= 100_000
    assert {64, 128} < sizes
    assert {program.mode.precision for program in real_programs} == {"f32", "bf16"}
    assert {program.mode.threads for program in real_programs} == {1, 2}
    assert all(program.mode.real_sizes for program in real_programs)


def test_a_program_of_real_sizes_is_the_same_again_and_runs_in_eager(real_programs: list[Program]) -> None:
    for index, program in enumerate(real_programs[:8]):
        assert modes.generated(9, index, modes.parse("real_sizes")) == program
        assert Program.from_dict(json.loads(json.dumps(program.to_dict()))) == program
        plain = modes.changed(program, modes.parse("no_grad,eval"))
        with torch.no_grad():
            module_of(plain)(*arguments(plain, "A", False))
        compile(script(plain, "title"), "<script>", "exec")


def test_what_a_program_costs_is_limited_before_it_runs() -> None:
    size = {"x": torch.empty(4096, 4096)}
    product = cost_of("x @ x", {"torch": torch}, size)
    assert product > 50 * MAX_SECONDS > cost_of("x[:64] @ x[:, :64]", {"torch": torch}, size)
    # Sorting is slower than adding, and views cost nothing.
    rows = {"x": torch.empty(100_000)}
    assert cost_of("x.sort()", {}, rows) > 5 * cost_of("x + 1", {}, rows) > cost_of("x[1:]", {}, rows) == 0


def _sum_of(kind: str, **sizes: int) -> Program:
    line = Line("sum", "{0}.sum()", ("x0",), ("v0",))
    mode = Mode(steps="A", options={"min_partition_us": 0}, real_sizes=True)
    return Program(3, (Input("x0", ("n0",), "float32", kind),), {}, (line,), ("v0",), "", mode, sizes)


def test_a_lost_digit_shows_at_real_sizes_and_another_order_of_addition_does_not() -> None:
    program = _sum_of("far", n0=10_000)

    def compiled(loss: float) -> Result:
        class Sum(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.reshape(100, 100).sum(0).sum() * (1 + loss)

        with mock.patch("fuzzing.run.compiled", lambda program, module: Sum()):
            return run(program)

    assert compiled(0.0).outcome == "ok"
    assert compiled(1e-6).outcome == "ok"
    lost = compiled(2e-4)
    assert (lost.outcome, lost.kind) == ("failed", "value")


def test_values_that_bfloat16_scatters_must_still_be_finite_and_of_the_same_size() -> None:
    clean, noise = _seen(torch.tensor([1.0, 2.0])), {"output 0": float("inf")}
    assert difference(_seen(torch.tensor([1.4, 1.7])), clean, noise, relative=2e-2) == ("", "")
    assert difference(_seen(torch.tensor([1.0, float("nan")])), clean, noise, relative=2e-2)[0] == "value"
    assert difference(_seen(torch.tensor([1.0, 1e36])), clean, noise, relative=2e-2)[0] == "value"


def test_a_failure_becomes_small_in_its_sizes() -> None:
    program = _sum_of("normal", n0=65_536)

    def ask(task: dict) -> dict:
        candidate = Program.from_dict(task["program"])
        if task.get("describe"):
            return {"outcome": "described", "values": describe(candidate)}
        fails = candidate.constants["n0"] > 33
        return {"outcome": "failed" if fails else "ok", "kind": "value" if fails else "", "detail": "", "step": 0}

    small = shrink(program, ask({"program": program.to_dict()}), ask, {}, 30.0)
    assert small.constants == {"n0": 34}


@pytest.mark.parametrize("kind", ["padding_bool", "left_inf", "left_causal_min", "random_bool", "band_1e4"])
def test_masks_close_rows_only_where_they_may(kind: str) -> None:
    def open_keys(least: int) -> torch.Tensor:
        spec = Input("x0", ("B", 1, "S", "S"), "bool" if kind.endswith("bool") else "float32", kind, least)
        mode = Mode(sizes=({"B": 16, "S": 40}, {"B": 16, "S": 40}), steps="A")
        mask = arguments(Program(7, (spec,), {}, (), (), "", mode), "A", False)[0]
        assert mask.shape == (16, 1, 40, 40)
        return (mask if mask.dtype is torch.bool else mask == 0).sum(-1)

    assert int(open_keys(1).min()) >= 1
    assert "band" in kind or int(open_keys(0).min()) == 0


def test_each_fault_of_the_plugin_is_put_into_a_model_before_it_is_compiled() -> None:
    x = Input("x0", (1, 2, 8, 4), "float32")
    mask = Input("x1", (8, 8), "float32", "causal_inf", 1)
    attention = "torch.softmax({0} @ {0}.mT + {1}, -1) @ {0}"
    added = {
        clear_closed_rows: ("F.scaled_dot_product_attention({0}, {0}, {0}, attn_mask={1})", "Select"),
        select_behind_products: (attention, "Select"), add_row_to_scores: (attention, "IsNaN"),
        bound_pools: ("F.max_pool2d({0}, 2) + {1}[:4, :2].exp()", "Maximum"),
    }  # fmt: skip
    for change, (code, kind) in added.items():
        names: list[str] = []

        def look(model: ov.Model, names: list[str] = names) -> str:
            names += [node.get_type_name() for node in model.get_ops()]
            return ""

        with mock.patch("torchserve_openvino.backend.runtime.build.crashes_plugin", before_compiling(change)(look)):
            assert run(_program(code, x, mask)).outcome == "ok"
        assert kind in names, code


def test_values_whose_elements_share_memory_are_known() -> None:
    """Eager PyTorch's `slice_scatter` of them changes other elements (docs/limits.md)."""
    line = torch.zeros(4)
    for value, overlaps in [
        (line.unfold(0, 2, 1), True), (line.unfold(0, 2, 2), False), (line[:, None].expand(4, 2), True),
        (torch.zeros(3, 4).t()[1:], False), (torch.zeros(0, 4), False), (torch.tensor(1.0), False),
    ]:  # fmt: skip
        assert Val("v0", value, set()).overlaps_itself is overlaps, value.stride()


def test_no_branch_depends_on_the_rounding_of_a_sum() -> None:
    drawn = [line for index in range(400) for line in generate(44, index).lines if line.op == "cond"]
    assert drawn
    assert not [line.code for line in drawn if "}.sum() >" in line.code]


def test_plain_cond_is_pythons_if() -> None:
    assert plain_cond(torch.tensor(True), lambda a: a + 1, lambda a: a, (1,)) == 2
    assert plain_cond(torch.tensor(False), lambda a: a + 1, lambda a: a, (1,)) == 1


def test_a_simple_program_is_as_in_eager() -> None:
    program = modes.changed(generate(1, 13), modes.parse("openvino,static,no_grad,guarded,eval"))
    assert run(program).outcome == "ok"


def _program(code: str, *inputs: Input) -> Program:
    line = Line("line", code, tuple(spec.name for spec in inputs), ("v0",))
    return Program(3, inputs, {}, (line,), ("v0",), "", Mode(steps="A", options={"min_partition_us": 0}))


def test_a_script_makes_the_inputs_of_the_program() -> None:
    first = Input("x0", (2, 3), "float32", layout="offset")
    twin = replace(first, name="x1", same_as="x0")
    rows = Input("x2", (2, 3), "float32", layout="strided", grad=False)
    program = _program("{0} + {1} + {2}", first, twin, rows).with_mode(grad="grad", steps="AWA")
    text = script(program, "title")
    made = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "inputs_A"]
    space = {"torch": torch}
    exec(compile(ast.Module(list(made), []), "<script>", "exec"), space)
    ours, wanted = space["inputs_A"](), arguments(program, "A", True)  # type: ignore[operator]
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4, check_stride=True)
        assert (mine.requires_grad, mine.storage_offset()) == (theirs.requires_grad, theirs.storage_offset())
    assert ours[0] is ours[1]
    assert "for step in 'AWA'" in text


def test_nan_of_eager_that_openvino_does_not_hand_on_is_no_failure_and_one_of_ours_is() -> None:
    x = Input("x0", (4,), "float32")
    lost = run(_program("torch.relu(({0} - {0}) / ({0} - {0}))", x))
    assert (lost.outcome, lost.kind) == ("nan", "value")
    with mock.patch(
        "torchserve_openvino.backend.runtime.execute.laid_out_copy", lambda tensor, layout: tensor * float("nan")
    ):
        made = run(_program("{0}.t().exp()", Input("x0", (4, 3), "float32")))
    assert (made.outcome, made.kind) == ("failed", "value")
    assert MADE_NAN in made.detail
