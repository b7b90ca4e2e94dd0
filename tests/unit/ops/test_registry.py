"""The operator registry: rules of overloads and packets, each declared once, for operators that exist."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import library as torch_library

import torchserve_openvino.ops
from torchserve_openvino.ops import overloads, rule_registry
from torchserve_openvino.ops.rule_registry import Movement, Rule, conversion, declare, decomposition, rule_of

aten = torch.ops.aten
FAMILIES = Path(torchserve_openvino.ops.__file__).parent / "rules"


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    monkeypatch.setattr(rule_registry, "RULES", dict(rule_registry.RULES))
    return rule_registry.RULES


def test_every_rule_is_of_an_operator_that_exists(rules) -> None:
    # Of packages that this one does not import.
    elsewhere = {"torchvision.roi_align.default", "torchvision.nms.default", "transformers.grouped_mm_fallback.default"}
    for name in rules.keys() - elsewhere:
        assert overloads(name), name


def test_what_an_overload_s_rule_does_not_say_its_packet_s_says() -> None:
    declare(Rule(movement=Movement.SELECTS, banned="all"), "mylib.choose")
    declare(Rule(banned="this one"), "mylib.choose.default")
    found = rule_of("mylib.choose.default")
    assert found.movement is Movement.SELECTS and found.banned == "this one"
    assert rule_of("mylib.choose.other").banned == "all"


def test_declarations_add_up_and_none_overwrites_another() -> None:
    declare(Rule(verified=True), "mylib.known.default")
    declare(Rule(multiplies=True), "mylib.known.default")
    assert rule_of("mylib.known.default").verified and rule_of("mylib.known.default").multiplies
    with pytest.raises(ValueError, match=r"mylib\.known\.default: verified declared twice"):
        declare(Rule(verified=True), "mylib.known.default")


def test_a_function_is_declared_with_what_else_there_is_to_say() -> None:
    @decomposition("mylib.split.default", rule=Rule(banned="wrong"))
    def split(x):
        return NotImplemented

    @conversion("mylib.split.default")
    def build(x):
        return x

    rule = rule_of("mylib.split.default")
    assert rule.decompose is split and rule.convert is build and rule.banned == "wrong"


def test_what_is_no_operator_has_an_empty_rule() -> None:
    assert rule_of("operator.add") is rule_of("mylib.unheard_of.default")


def test_a_ban_says_what_openvino_does_and_a_decomposition_says_so(rules) -> None:
    for name, rule in rules.items():
        instead = "a decomposition computes it instead" in rule.banned
        taken_apart = rule.decompose or name in torch_decomposed()
        assert not instead or taken_apart, name


def torch_decomposed() -> set[str]:
    return {str(op) for op in torch._decomp.decomposition_table} | {"aten._safe_softmax.default"}


def test_each_operator_has_one_home(rules) -> None:
    """All functions of an operator that are in `ops/rules` are in one file."""
    for name, rule in rules.items():
        functions = (rule.decompose, rule.decompose_traced, rule.decompose_strided, rule.convert, rule.limit)
        homes = {Path(each.__code__.co_filename) for each in functions if each is not None}
        assert len({home for home in homes if home.parent == FAMILIES}) <= 1, (name, homes)


def test_a_changed_rule_changes_what_is_decomposed(rules) -> None:
    from torchserve_openvino.ops.decompositions import own_decompositions

    assert aten.hypot.default in own_decompositions()
    rules["aten.hypot.default"] = replace(rules["aten.hypot.default"], decompose=None)
    assert aten.hypot.default not in own_decompositions()


def test_a_decomposition_may_end_in_operators_that_are_decomposed_in_turn(monkeypatch) -> None:
    from torchserve_openvino.backend.upstream._openvino_private import frontend_converts, upstream_supported
    from torchserve_openvino.ops import SupportTable, decomposition_table

    library = torch_library.Library("registry_test", "FRAGMENT")
    for name in ("outer", "inner"):
        library.define(f"{name}(Tensor x) -> Tensor")
    outer, inner = torch.ops.registry_test.outer.default, torch.ops.registry_test.inner.default
    library.impl("inner", lambda x: x + 1, "Meta")
    # The order of torch's table must not matter.
    monkeypatch.setitem(torch._decomp.decomposition_table, outer, lambda x: inner(x) * 2)
    monkeypatch.setitem(torch._decomp.decomposition_table, inner, lambda x: x + 1)
    table = decomposition_table(SupportTable(upstream_supported(), converts=frontend_converts), ())
    assert table[outer](torch.ones(2, device="meta")) is not NotImplemented
