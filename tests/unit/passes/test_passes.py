"""The lists of passes and what runs them."""

import inspect
import logging
import sys

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.conversion import convert
from torchserve_openvino.errors import InexactValueError
from torchserve_openvino.passes.lists import FX_PASSES, OV_PASSES
from torchserve_openvino.passes.manager import Pass, PassError, due, run_passes
from torchserve_openvino.passes.pass_context import PassContext

PASSES = [*FX_PASSES, *OV_PASSES]
ORDER = ("graph", "partition", "model", "device")


def append(name: str):
    def run(subject: list, context: PassContext) -> None:
        subject.append(name)

    run.__name__ = name
    return run


def fail(error: Exception):
    def run(subject: object, context: PassContext) -> None:
        raise error

    return run


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_a_pass_is_documented_and_takes_a_graph_and_a_context(each: Pass) -> None:
    module = sys.modules[each.run.__module__]
    assert module.__doc__ and each.run.__doc__
    _, context = inspect.signature(each.run).parameters.values()
    assert context.annotation is PassContext
    assert inspect.signature(each.run).return_annotation is None


def test_names_are_unique_and_stages_in_order() -> None:
    names = [each.name for each in PASSES]
    assert len(names) == len(set(names))
    places = [ORDER.index(each.stage) for each in PASSES]
    assert places == sorted(places)


def test_passes_of_a_stage_run_in_order_if_their_condition_holds(caplog: pytest.LogCaptureFixture) -> None:
    passes = [
        Pass(append("one"), "model"),
        Pass(append("other_stage"), "device"),
        Pass(append("two"), "model", when=lambda context: "two" in context.config),
        Pass(append("three"), "model", when=lambda context: "three" in context.config),
    ]
    subject: list[str] = []
    context = PassContext(config={"three": 1})
    with caplog.at_level(logging.DEBUG, "torchserve_openvino.passes"):
        run_passes(passes, "model", subject, context)
    assert subject == ["one", "three"] == [each.name for each in due(passes, "model", context)]
    assert set(context.seconds) == {"one", "three"} and min(context.seconds.values()) >= 0
    assert "three 0.0" in caplog.text


def test_an_unexpected_error_names_its_pass_and_a_refusal_stays_as_it_is() -> None:
    with pytest.raises(PassError, match="the pass run failed: ValueError: odd") as raised:
        run_passes([Pass(fail(ValueError("odd")), "model")], "model", None, PassContext())
    assert raised.value.name == "run" and isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(InexactValueError, match="^too large$"):
        run_passes([Pass(fail(InexactValueError("too large")), "model")], "model", None, PassContext())


def test_a_failed_pass_costs_its_partition_and_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "OV_PASSES", (*OV_PASSES, Pass(fail(ValueError("odd")), "model")))
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(8, 64)
    compiled = tov.compile(model, options={"min_partition_us": 0})
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    (fallback,) = compiled.report.fallbacks
    assert fallback.kind == "conversion_failed"
    assert fallback.reason == "the pass run failed: ValueError: odd"
