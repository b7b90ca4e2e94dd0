"""The fuzzer itself: reproducible programs that run in eager, comparison with eager, and shrinking of failures."""

import ast
import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fuzzing import modes
from fuzzing.context import plain_cond
from fuzzing.describe import describe
from fuzzing.generate import generate
from fuzzing.judge import MADE_NAN, difference, noise_of
from fuzzing.observe import Observation, observe
from fuzzing.program import Input, Line, Mode, Program
from fuzzing.registry import ENTRIES
from fuzzing.run import module_of, run
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
