"""A lowered graph to JSON and back: it gives the same answers, and only ever calls operators."""

import json
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import assert_same
from torchserve_openvino.backend.routes.serialized_graph import (
    PlainGraph,
    PlainGraphError,
    decode,
    encode,
    text_to_tree,
    to_plain,
    tree_to_text,
)

aten = torch.ops.aten


def through_json(value: Any) -> Any:
    """Round-trips a value through strict JSON, as the store does."""
    return json.loads(json.dumps(value, allow_nan=False))


def back(module: GraphModule, attributes: dict[str, torch.Tensor] | None = None, **parts: Any) -> PlainGraph:
    return PlainGraph(through_json(to_plain(module.graph)), parts, attributes or {})


GRAPHS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x: torch.relu(x) * 2 - x / 3,
    "several outputs": lambda x: torch.topk(x, 2)[0] + torch.topk(x, 2)[1],
    "split": lambda x: torch.split(x, [1, 2], dim=1)[1] * 2,
    "cat": lambda x: torch.cat([x, x * 2, x + 1], dim=0),
    "slices": lambda x: x[:, 1:] + x[:1, :2],
    "index": lambda x: x[torch.tensor([1, 0])],
    "keywords": lambda x: x.sum(1, keepdim=True, dtype=torch.float64),
    "dtype": lambda x: x.to(torch.bfloat16),
    "memory format": lambda x: x[None, None].clone(memory_format=torch.channels_last),
    "device": lambda x: x + torch.arange(3, device="cpu"),
    "layout": lambda x: x + torch.zeros(3, layout=torch.strided),
    "infinity": lambda x: x.masked_fill(x > 0, float("-inf")),
    "nan": lambda x: x.masked_fill(x > 0, float("nan")),
    "clamp": lambda x: x.clamp(min=-1, max=float("inf")),
    "complex": lambda x: (x * (1 + 2j)).abs(),
    "none inside a list": lambda x: aten.index.Tensor(x, [None, torch.tensor([0, 2])]),
    "text": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "in place on a copy": lambda x: aten.add_.Tensor(x.clone(), 1),
    "nothing": lambda x: x,
    "a tuple": lambda x: (x * 2, None, 5, x),
}


@pytest.mark.parametrize("function", GRAPHS.values(), ids=GRAPHS)
def test_a_graph_comes_back(function: Callable[..., Any]) -> None:
    x = torch.randn(2, 3)
    module = make_fx(function)(x)
    attributes = {str(n.target): getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
    graph = back(module, attributes)
    for value in (x, x * -1, x + 5):
        assert_same(graph(value), function(value))


def test_inputs_keep_their_order_and_are_counted() -> None:
    graph = back(make_fx(lambda a, b, c: a - b * 2 + c * 3)(*[torch.randn(2) for _ in range(3)]))
    a, b, c = torch.randn(2), torch.randn(2), torch.randn(2)
    assert_same(graph(a, b, c), a - b * 2 + c * 3)
    for wrong in ((), (a,), (a, b), (a, b, c, a)):
        with pytest.raises(ValueError):
            graph(*wrong)


def test_an_input_that_is_not_used() -> None:
    module = make_fx(lambda a, b: b * 2)(torch.randn(2), torch.randn(2))
    a, b = torch.randn(2), torch.randn(2)
    assert_same(back(module)(a, b), b * 2)


def test_no_value_is_kept_from_one_call_to_the_next() -> None:
    graph = back(make_fx(lambda x: aten.add_.Tensor(x * 2, 1))(torch.randn(2)))
    first = graph(torch.zeros(2))
    graph(torch.ones(2))
    assert_same(first, torch.ones(2))


def test_a_constant_is_not_written_to() -> None:
    module = GraphModule({"c": torch.zeros(2)}, Graph())
    x = module.graph.placeholder("x")
    c = module.graph.get_attr("c")
    copy = module.graph.call_function(aten.lift_fresh_copy.default, (c,))
    module.graph.output(module.graph.call_function(aten.add_.Tensor, (copy, x)))
    graph = back(module, {"c": torch.zeros(2)})
    assert_same([graph(torch.ones(2)), graph(torch.ones(2))], [torch.ones(2), torch.ones(2)])


def test_parts_are_called_by_name() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_module("one", (x, 3))
    z = graph.call_function(operator.getitem, (y, 1))
    graph.output((z, x))
    plain = through_json(to_plain(graph))
    run = PlainGraph(plain, {"one": lambda a, b: (a, a * b)}, {})
    assert_same(run(torch.ones(2)), (torch.full((2,), 3.0), torch.ones(2)))
    with pytest.raises(PlainGraphError, match="one"):
        PlainGraph(plain, {}, {})


@pytest.mark.parametrize("target", [print, math.floor, torch.relu, len, lambda x: x, "append"])
def test_a_function_that_is_no_operator_has_no_plain_form(target: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method(target, (x,)) if isinstance(target, str) else graph.call_function(target, (x,)))
    with pytest.raises(PlainGraphError):
        to_plain(graph)


NAMES = ["os.system", "aten", "aten.relu", "aten.nothing.default", "eval", "getattr", "__class__", "builtins.eval", "",
         "aten.relu.default.__call__", "_load_global", "load_library", "aten.relu.__init__", "prims", "..",
         "loaded_libraries",
         "import_module", "higher_order.cond"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_can_only_name_operators(name: str) -> None:
    call = {"op": "call", "name": name, "args": {"tuple": []}, "kwargs": {"dict": {}}}
    plain = {"nodes": [{"op": "placeholder"}, call]}
    with pytest.raises(PlainGraphError):
        PlainGraph(plain, {}, {})


def test_a_missing_constant_is_told() -> None:
    with pytest.raises(PlainGraphError, match="c0"):
        PlainGraph({"nodes": [{"op": "attribute", "name": "c0"}]}, {}, {})


@pytest.mark.parametrize("node", [{"op": "exec"}, {"op": "call_method", "name": "add"}, {}], ids=str)
def test_an_unknown_kind_of_node_is_an_error(node: dict[str, Any]) -> None:
    with pytest.raises((PlainGraphError, LookupError)):
        PlainGraph({"nodes": [{"op": "placeholder"}, node]}, {}, {})


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.strided, torch.channels_last, torch.contiguous_format])
    | st.sampled_from([torch.device("cpu"), torch.device("meta"), slice(1, None, 2), slice(None)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(LITERALS)
def test_any_literal_comes_back(value: Any) -> None:
    # Compared by repr, because nan != nan, and 1 == True == 1.0.
    assert repr(decode(through_json(encode(value)))) == repr(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, torch.ones(2), print, torch.Generator()])
def test_what_is_no_literal(value: Any) -> None:
    with pytest.raises(PlainGraphError):
        encode(value)


WRONG: list[Any] = [
    {"thing": 1}, {"dtype": "torch.nn"}, {"dtype": "float32"}, {"node": 7}, {}, {"list": [], "tuple": []},
    {"device": "x"},
    {"complex": 1}, {"slice": [1, 2, 3, 4]}, {"dict": [1]}, {"list": None},
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_encode_never_makes(value: Any) -> None:
    # `CallCache.load` treats an exception as a damaged entry.
    with pytest.raises((LookupError, TypeError, ValueError, RuntimeError)):
        decode(value, [])


def test_a_subclass_of_text_or_number_is_no_literal() -> None:
    class Name(str):
        pass

    with pytest.raises(PlainGraphError):
        encode(Name("x"))


TREES: list[Any] = [
    1, [1, 2], (1, 2), {"a": 1, "b": [2]}, {1: 1, 2: 2}, {"a": None}, (), [], {}, {True: 1}, {None: 1}, {"": 1},
    {1.5: 1},
    {"b": 1, "a": 2}, [(1, {"x": [2]})],
]  # fmt: skip


@pytest.mark.parametrize("value", TREES, ids=str)
def test_a_structure_comes_back(value: Any) -> None:
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(value)
    got = pytree.tree_unflatten(leaves, text_to_tree(tree_to_text(spec)))
    assert repr(got) == repr(value)


@pytest.mark.parametrize("value", [{(1, 2): 1}, {frozenset([1]): 1}, {torch.float32: 1}, {b"a": 1}], ids=str)
def test_a_structure_either_comes_back_or_is_refused(value: Any) -> None:
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(value)
    try:
        text = tree_to_text(spec)
    except ValueError:
        return
    assert repr(pytree.tree_unflatten(leaves, text_to_tree(text))) == repr(value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[1]", "null", '[1, {"type": "os.system", "context": "[]", "children_spec": []}]',
     '[1, {"type": "builtins.dict", "context": "x", "children_spec": []}]', '[9, {}]',
     '[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'],
)  # fmt: skip
def test_a_text_that_is_no_structure(text: str) -> None:
    # `CallCache.load` treats an exception as a damaged entry.
    with pytest.raises((LookupError, TypeError, ValueError, RuntimeError)):
        text_to_tree(text)
