import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchserve_openvino.config import resolve_options
from torchserve_openvino.errors import ConfigError, UnknownOperatorError


def disabled(ops):
    return resolve_options({"disabled_ops": ops}, env={}).options.disabled_ops


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("torch.ops.aten.relu.default", "aten.relu.default"),
        ("aten.relu.default", "aten.relu.default"),
        ("aten::relu.default", "aten.relu.default"),
        ("aten::relu", "aten.relu"),
        ("aten.relu", "aten.relu"),
        ("torch.ops.aten.relu", "aten.relu"),
        (" aten.add.Tensor ", "aten.add.Tensor"),
        (torch.ops.aten.relu, "aten.relu"),
        (torch.ops.aten.relu.default, "aten.relu.default"),
    ],
)
def test_every_spelling(spelling, canonical):
    assert disabled([spelling]) == (canonical,)
    assert disabled(spelling) == (canonical,)
    assert disabled((spelling, spelling)) == (canonical,)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("relu", "aten.relu"),
        ("aten.rellu", "aten.relu"),
        ("aten::rellu.default", "aten.relu.default"),
        ("aten.relu.defualt", "aten.relu.default"),
        ("aten.add.tensor", "aten.add.Tensor"),
        ("atn.relu", "aten.relu"),
        ("mylib.myop", None),
        ("torch.nn.functional.relu", None),
        ("", "aten.t"),
    ],
)
def test_an_unknown_operator(name, suggestion):
    with pytest.raises(UnknownOperatorError) as caught:
        disabled(["aten.relu", name])
    assert caught.value.key == "disabled_ops[1]"
    assert caught.value.suggestion == suggestion


def test_an_operator_library_of_the_user():
    with pytest.raises(UnknownOperatorError, match="import that library in the handler file"):
        disabled("tov_names_test.twice")
    with torch.library._scoped_library("tov_names_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        assert disabled("tov_names_test::twice") == ("tov_names_test.twice",)
        assert disabled("torch.ops.tov_names_test.twice.default") == ("tov_names_test.twice.default",)


@pytest.mark.parametrize("ops", [3, [3], [None], {"aten.relu": 3, 4: 4}])
def test_what_is_no_name(ops):
    with pytest.raises(ConfigError):
        disabled(ops)


def test_decompositions():
    resolved = resolve_options({"decompositions": ["aten.addcdiv", "torch.ops.aten.addcmul.default"]}, env={})
    assert resolved.options.decompositions == ("aten.addcdiv", "aten.addcmul.default")
    with pytest.raises(ConfigError, match=r"decompositions: torch has no decomposition for 'aten.mm'"):
        resolve_options({"decompositions": ["aten.addcdiv", "aten.mm"]}, env={})


SOME = [str(op) for op in (torch.ops.aten.relu.default, torch.ops.aten.add.Tensor, torch.ops.aten.mm.default)]


@given(st.sampled_from(SOME), st.sampled_from(["", "torch.ops.", "ops."]), st.booleans(), st.booleans())
def test_spellings_agree(name, prefix, colons, overload):
    packet = name.rsplit(".", 1)[0]
    chosen = name if overload else packet
    spelled = prefix + (chosen.replace(".", "::", 1) if colons else chosen)
    assert disabled(spelled) == (chosen,)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SOME), st.data())
def test_random_misspellings_get_a_suggestion(name, data):
    namespace, operator, overload = name.split(".")
    index = data.draw(st.integers(0, len(operator)))
    misspelt = f"{namespace}.{operator[:index]}qz{operator[index:]}.{overload}"
    with pytest.raises(UnknownOperatorError) as caught:
        disabled(misspelt)
    assert caught.value.suggestion == name
