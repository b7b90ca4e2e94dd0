"""Further keys that are tried: which, and when a value is taken."""

import random

import pytest
import yaml

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings, changes, engines
from torchserve_openvino.tune.keys import with_changes
from torchserve_openvino.tune.offered_options import Option, effect, offered, worth_taking
from torchserve_openvino.tune.settings import Settings

CONFIG = yaml.safe_load("""
pt2: {compile: {enable: true, backend: openvino}}
handler: {openvino: {warmup: {inputs: [{shape: [3, 64, 64]}]}}}
""")
FOLD = Option(("handler", "openvino", "image", "fold"), "true")


def names(task: str, config=CONFIG, named=None, siblings: bool = False) -> list[str]:
    return [str(option) for option in offered(config, task, named, siblings)]


def test_what_is_tried_depends_on_the_task_and_the_machine() -> None:
    assert names("tensor") == ['pt2.compile.backend "export"']
    assert "image.fold true" in names("image_classifier")
    assert {"batching.one_graph true", "batching.one_graph false"} < set(names("text_classifier"))
    assert 'pt2.compile.options.config.ENABLE_HYPER_THREADING "YES"' in names("tensor", siblings=True)
    generation = names("text_generator")
    assert 'generate.kv_cache "u8"' in generation and not [name for name in generation if "backend" in name]


def test_what_is_set_already_is_not_tried() -> None:
    folded = with_changes(CONFIG, {FOLD.path: True})
    assert "image.fold true" not in names("image_classifier", folded)
    assert names("tensor", {"pt2": "openvino"}) == []
    assert names("tensor", {"pt2": {"compile": {"enable": True, "backend": "export"}}}) == []


def test_users_name_other_keys() -> None:
    named = Settings(options={"batching.dims.length": [[32, 64]], "pt2.compile.dynamic": [True]}).options
    assert names("tensor", named=named) == ["batching.dims.length [32, 64]", "pt2.compile.dynamic true"]
    assert names("image_classifier", named={}) == []


@pytest.mark.parametrize("task", ["tensor", "image_classifier", "text_classifier", "text_generator"])
def test_every_value_is_valid(task: str) -> None:
    for option in offered(CONFIG, task, None, True):
        present = Candidate(ComputeSettings("f32", 2), 1, 1, 1)
        changed = changes(Candidate(ComputeSettings("f32", 2, 1, (option,)), 1, 1, 1), present, CONFIG)
        assert changed == option.changes
        load_serving_config(with_changes(CONFIG, changed), check_device=False)


def rounds(ms: float, seed: int, noise: float = 0.02) -> dict[int, list[float]]:
    rng = random.Random(seed)
    return {size: [ms * size * (1 + rng.gauss(0, noise)) for _ in range(5)] for size in (1, 8)}


def test_a_value_is_taken_only_if_it_is_faster_for_certain() -> None:
    present = rounds(10.0, 0)
    faster, same, noisy = (effect(present, rounds(*each)) for each in ((8.0, 1), (9.9, 2), (9.0, 3, 0.3)))
    assert 1.2 < faster.value < 1.3 and faster.low > 1.15
    other, third = Option(("a",), "1"), Option(("b",), "1")
    assert worth_taking({FOLD: faster, other: same, third: noisy}) == (FOLD,)
    assert effect(present, rounds(20.0, 4)).value == pytest.approx(0.5, rel=0.05)


def test_of_several_values_of_a_key_the_fastest_is_taken() -> None:
    present = rounds(10.0, 0)
    one, other = Option(("generate", "step_tokens"), "64"), Option(("generate", "step_tokens"), "1024")
    effects = {one: effect(present, rounds(8.0, 1)), other: effect(present, rounds(5.0, 2))}
    assert worth_taking(effects) == (other,)


def test_all_engines_but_the_present_one_have_the_values_that_were_taken() -> None:
    present = Candidate(ComputeSettings("f32", 2), 1, 1, 1)
    ways = engines(present, 2, ["f32", "bf16"], (FOLD,))
    assert present.engine in ways and all(way.options == (FOLD,) for way in ways if way != present.engine)
    assert "image.fold true" in str(Candidate(ways[0] if ways[0].options else ways[1], 1, 1, 1))
