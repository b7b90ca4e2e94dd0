"""Where a model takes one row of a sequence, the other rows are computed only as far as something needs them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.passes.fx.selected_rows import compute_selected_rows
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten
BATCH, ROWS, WIDTH = 2, 6, 8
WEIGHT, BIAS = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH).sin(), torch.linspace(-1, 1, WIDTH)
# Those of the model that is traced: its inputs, as in the graphs of this package.
of = SimpleNamespace(weight=WEIGHT, bias=BIAS)
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> list[int]:
    """Runs the pass on a function's graph, compares the results, and returns how many rows each product has."""

    def model(weight: Tensor, bias: Tensor, *inputs: Tensor) -> Any:
        of.weight, of.bias = weight, bias
        return function(*inputs)

    inputs = (WEIGHT, BIAS, *inputs)
    traced = make_fx(model, tracing_mode=mode)(*inputs)
    traced.graph.eliminate_dead_code()
    expected = traced(*inputs)
    compute_selected_rows(traced.graph, PassContext())
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), expected, rtol=1e-4, atol=1e-5)
    rows = RowsOfProducts(traced)
    rows.run(*inputs)
    return rows.found


class RowsOfProducts(torch.fx.Interpreter):
    """Runs a graph, and compares what it computes with what its nodes say."""

    def __init__(self, traced: torch.fx.GraphModule) -> None:
        super().__init__(traced)
        self.found: list[int] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            assert n.users, f"{n} is left over"
            stated = n.meta["val"]
            assert result.dtype is stated.dtype and result.dim() == stated.dim(), n
            if n.target in PRODUCTS:
                self.found.append(result.shape[-2])
        return result


def layer(x: Tensor) -> Tensor:
    """The second half of an encoder's layer: a norm, a feed-forward network, a residual."""
    x = F.layer_norm(x, (WIDTH,), of.bias, of.bias)
    return F.layer_norm(
        x + F.linear(F.gelu(F.linear(x, of.weight, of.bias)), of.weight, of.bias), (WIDTH,), of.bias, of.bias
    )


# What a model takes, and the rows of its two products then.
ALONE = {
    "first": lambda x: layer(x)[:, 0],
    "last": lambda x: layer(x)[:, -1],
    "middle": lambda x: layer(x)[:, 3],
    "kept as a dimension": lambda x: layer(x)[:, :1],
    "twice": lambda x: _twice(layer(x)),
    "behind an activation": lambda x: torch.tanh(layer(x) * 2 + of.bias)[:, 0],
    "with a value for each row": lambda x: (layer(x) + x[0])[:, 2],
    "with a number for each row": lambda x: (layer(x) * x[:1, :, :1])[:, 2],
    "of rows that come first": lambda x: layer(x).transpose(0, 1)[4],
    "of merged rows that are split again": lambda x: layer(x).reshape(-1, WIDTH).exp().reshape(x.shape)[:, 1],
    "of heads": lambda x: layer(x).view(BATCH, -1, 2, WIDTH // 2).permute(0, 2, 1, 3)[:, :, 1],
    "where another dimension is cut": lambda x: layer(x)[:, :, 2:5][:, 0],
}  # fmt: skip


def _twice(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, 0] * 2, hidden[:, 0] + 1


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ALONE)
def test_one_row_is_computed_where_one_is_taken(name: str, mode: str) -> None:
    x = values(BATCH, ROWS, WIDTH)
    assert products(ALONE[name], x, mode=mode) == [BATCH, BATCH]


TOGETHER = {
    "two rows": lambda x: _two(layer(x)),
    "a row and all": lambda x: _row_and_all(layer(x)),
    "a row and their mean": lambda x: _row_and_mean(layer(x)),
    "a row behind a softmax of rows": lambda x: layer(x).softmax(1)[:, 0],
    "a column": lambda x: layer(x)[..., 0],
    "several rows": lambda x: layer(x)[:, :3],
}


def _two(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, 0], hidden[:, 1]


def _row_and_all(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, 0], hidden


def _row_and_mean(hidden: Tensor) -> Tensor:
    return hidden[:, 0] - hidden.mean(1)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", TOGETHER)
def test_all_rows_are_computed_where_others_are_needed(name: str, mode: str) -> None:
    x = values(BATCH, ROWS, WIDTH)
    assert products(TOGETHER[name], x, mode=mode) == [BATCH * ROWS] * 2


def test_what_needs_all_rows_stays_and_what_is_behind_it_does_not() -> None:
    def attention(x: Tensor) -> Tensor:
        scores = torch.bmm(x, x.transpose(1, 2)).softmax(-1)
        return layer(torch.bmm(scores, x))[:, 0]

    x = values(BATCH, ROWS, WIDTH)
    assert products(attention, x) == [ROWS, 1, BATCH, BATCH]


def test_a_squeeze_that_does_nothing_for_all_rows_would_for_one() -> None:
    x = values(BATCH, ROWS, WIDTH)
    assert products(lambda x: aten.squeeze.dim(layer(x), 1)[:, 0], x)


def test_a_bias_for_each_row_and_a_product_with_itself() -> None:
    x, bias = values(ROWS, ROWS), values(ROWS, ROWS, seed=1)
    assert products(lambda x, bias: torch.addmm(bias, x, x.t()).relu()[2], x, bias) == [ROWS]
    assert products(lambda x, _: torch.mm(x, x).relu()[2], x, bias) == [ROWS]
    assert products(lambda x, bias: torch.mm(x, bias).relu()[2:3], x, bias) == [1]


def test_integers_are_checked_in_all_rows() -> None:
    x = torch.arange(BATCH * ROWS * WIDTH).reshape(BATCH, ROWS, WIDTH)

    def model(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm((x // 3).reshape(-1, WIDTH).float(), weight).reshape(x.shape)[:, 0]

    traced = make_fx(model, tracing_mode="fake")(x, WEIGHT)
    compute_selected_rows(traced.graph, PassContext())
    (divided,) = [node for node in traced.graph.nodes if node.target is aten.floor_divide.default]
    assert divided.meta["val"].shape == x.shape


# --- rows that indices choose -----------------------------------------------------------------------------------

LAST = torch.tensor([4, -2])
SOME = torch.tensor([[0, 5, 5], [2, 1, 0]])


def numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


# With the rows of each product.
CHOSEN: dict[str, tuple[Callable[..., Any], Tensor, int]] = {
    "one of each": (lambda x, rows: layer(x)[numbers(x), rows], LAST, BATCH),
    "behind the head": (lambda x, rows: layer(x).exp()[numbers(x), rows] + 1, LAST, BATCH),
    "several": (lambda x, rows: layer(x)[numbers(x)[:, None], rows], SOME, BATCH * 3),
    "a column of one": (lambda x, rows: layer(x)[numbers(x)[:, None], rows], LAST[:, None], BATCH),
    "of indices that are computed late": (lambda x, rows: _late(layer(x), rows), LAST, BATCH),
    "and the first of them": (lambda x, rows: layer(x)[numbers(x)[:, None], rows][:, 0], SOME, BATCH * 3),
    "merged and split": (
        lambda x, rows: layer(x).reshape(-1, WIDTH).exp().reshape(x.shape)[numbers(x)[:, None], rows], SOME, BATCH * 3
    ),
}  # fmt: skip


def _late(hidden: Tensor, rows: Tensor) -> Tensor:
    return hidden[numbers(hidden), (rows * 2 // 2).clamp(min=0)]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", CHOSEN)
def test_only_chosen_rows_are_computed(name: str, mode: str) -> None:
    model, indices, rows = CHOSEN[name]
    # How many are chosen has to be known.
    rows = BATCH * ROWS if mode == "symbolic" and indices is SOME else rows
    assert products(model, values(BATCH, ROWS, WIDTH), indices, mode=mode) == [rows] * 2


OF_ALL: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "of groups in another order": (lambda x, rows: layer(x)[numbers(x).flip(0), rows], LAST),
    "of groups from the second on": (lambda x, rows: layer(x)[numbers(x) - 1, rows], LAST),
    "of the first group": (lambda x, rows: layer(x)[rows * 0, rows], LAST),
    "the same for each group": (lambda x, rows: layer(x)[:, rows], LAST),
    "of elements": (lambda x, rows: layer(x)[numbers(x), :, rows], LAST),
    "each pair": (lambda x, rows: layer(x)[numbers(x)[:, None], rows[None]], LAST),
    "of numbers that were rounded": (lambda x, rows: _rounded(x, rows), LAST),
    "with a value for each row": (lambda x, rows: (layer(x) + x[:1])[numbers(x), rows], LAST),
    "of rows that come first": (lambda x, rows: layer(x).transpose(0, 1)[numbers(x[0]), rows], torch.arange(ROWS) % 2),
    "as many as there are": (lambda x, rows: layer(x)[numbers(x)[:, None], rows.repeat(1, 2)], SOME),
    "chosen twice": (lambda x, rows: layer(x)[numbers(x), rows] - layer(x)[numbers(x), rows + 1], LAST),
    "and their mean": (lambda x, rows: _chosen_and_mean(layer(x), rows), LAST),
}  # fmt: skip


def _rounded(x: Tensor, rows: Tensor) -> Tensor:
    many = torch.sin(x.repeat(145, 1, 1) * torch.arange(1.0, 291.0)[:, None, None])
    return layer(many)[numbers(many).bfloat16().long(), rows.repeat(145)]


def _chosen_and_mean(hidden: Tensor, rows: Tensor) -> Tensor:
    return hidden[numbers(hidden), rows] - hidden.mean(1)


@pytest.mark.parametrize("name", OF_ALL)
def test_other_indices_are_as_before(name: str) -> None:
    model, indices = OF_ALL[name]
    products(model, values(BATCH, ROWS, WIDTH), indices)


# --- compositions -------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, _: F.linear(x, of.weight, of.bias),
    "product": lambda x, _: torch.matmul(x, of.weight),
    "norm": lambda x, _: F.layer_norm(x, (WIDTH,), of.bias, of.bias),
    "norm of two": lambda x, _: F.layer_norm(x, x.shape[-2:]),
    "gelu": lambda x, _: F.gelu(x),
    "residual": lambda x, first: x + first,
    "half": lambda x, _: x.half().float(),
    "scaled": lambda x, _: x * of.bias,
    "rows": lambda x, _: x + x[0, :, :1],
    "batch": lambda x, _: x + x[:, :1, :1],
    "softmax": lambda x, _: x.softmax(-1),
    "softmax of rows": lambda x, _: x.softmax(1),
    "merged": lambda x, _: x.reshape(-1, WIDTH).sigmoid().reshape(x.shape),
    "flat": lambda x, _: x.reshape(-1).sin().reshape(x.shape),
    "split": lambda x, _: x.reshape(x.shape[0], x.shape[1], 2, 4).permute(0, 2, 1, 3).cos().transpose(1, 2)
    .reshape(x.shape),
    "paired": lambda x, _: x.reshape(x.shape[0], x.shape[1] // 2, 2, WIDTH).tanh().reshape(x.shape),
    "mixed": lambda x, _: torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x),
    "swapped": lambda x, _: x.transpose(0, 1).contiguous().relu().transpose(0, 1),
    "where": lambda x, first: torch.where(first > 0, x, x * 0.5),
    "squeezed": lambda x, _: x.unsqueeze(1).exp().clamp(max=3.0).squeeze(1),
    "flipped": lambda x, _: x.flip(1),
}  # fmt: skip
SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
    "third": lambda x: x[:, 2],
    "slice": lambda x: x[:, 3:4],
    "item": lambda x: x[1],
    "both": lambda x: x[1][2],
    "column": lambda x: x[..., 1],
    "two": lambda x: (x[:, 0], x[:, 2]),
    "transposed": lambda x: x.transpose(1, 2)[:, :, 0],
    "chosen": lambda x: x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % x.shape[1]],
    "chosen pairs": lambda x: x[torch.arange(x.shape[0])[:, None], torch.tensor([[0, 1]] * x.shape[0])],
    "chosen and first": lambda x: x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % x.shape[1]] + x[:, 0],
}


@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7),
    st.sampled_from(sorted(SELECTIONS)),
    st.sampled_from([(2, 6), (6, 6), (3, 2), (6, 2)]),
    st.sampled_from(["fake", "symbolic"]),
)
@settings(max_examples=150, deadline=None)
def test_any_composition_is_as_before(steps: list[str], selection: str, sizes: tuple[int, int], mode: str) -> None:
    def model(x: Tensor) -> Any:
        first = x
        for step in steps:
            x = STEPS[step](x, first)
        return SELECTIONS[selection](x)

    products(model, values(*sizes, WIDTH) if sizes[1] > 3 or selection not in {"third", "slice", "two", "both"}
             else values(sizes[0], 6, WIDTH), mode=mode)  # fmt: skip


# --- on OpenVINO --------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Two layers of attention, and a classifier of the first token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, activation="gelu")
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)])
        self.classifier = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return self.classifier(x[:, 0])


class Filler(Encoder):
    """Words for some positions, of a vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        lengths = (x[..., 0] > -9).sum(1)
        rows = torch.stack([lengths - 1, lengths // 2], 1)
        return self.classifier(x)[torch.arange(len(x))[:, None], rows]


@pytest.mark.parametrize("dynamic", [False, True])
def test_chosen_positions_are_as_in_eager(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Filler().eval()
    compiled = tov.compile(model, dynamic=dynamic, options={"min_partition_us": 0})
    for seed, shape in enumerate([(2, 16, 64), (3, 40, 64), (1, 7, 64)]):
        x = values(*shape, seed=seed)
        with torch.no_grad(), compiled.poisoned():
            assert_same(compiled(x), model(x))
    assert compiled.report.summary.coverage == 1.0


def test_a_chosen_row_that_is_not_there_is_eager_s_error() -> None:
    def model(x: Tensor, rows: Tensor) -> Tensor:
        return layer(x)[torch.arange(len(x)), rows]

    of.weight, of.bias = WEIGHT, BIAS
    compiled, x = tov.compile(model, dynamic=False, options={"min_partition_us": 0}), values(BATCH, ROWS, WIDTH)
    for rows in ([0, ROWS - 1], [-1, -ROWS]):
        assert_same(compiled(x, torch.tensor(rows)), model(x, torch.tensor(rows)))
    for rows in ([0, ROWS], [-ROWS - 1, 0]):
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(x, torch.tensor(rows))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_classifier_of_the_first_token_is_as_in_eager(dynamic: bool, precision: str) -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    config = {"INFERENCE_PRECISION_HINT": precision}
    compiled = tov.compile(model, dynamic=dynamic, options={"min_partition_us": 0, "config": config})
    for seed, shape in enumerate([(2, 16, 64), (3, 40, 64), (1, 7, 64)]):
        x = values(*shape, seed=seed)
        with torch.no_grad(), compiled.poisoned():
            answer, expected = compiled(x), model(x)
        if precision == "f32":
            assert_same(answer, expected)
        else:
            torch.testing.assert_close(answer, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    assert compiled.report.summary.coverage == 1.0


def test_groups_in_another_order_are_other_groups() -> None:
    linear = torch.nn.Linear(8, 8)

    def swapped(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        h = linear(x).view(2, 3, 6, 8).transpose(0, 1).reshape(6, 6, 8)
        return h[torch.arange(6), rows]

    def permuted(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        h = linear(x).view(2, 3, 6, 8).permute(1, 0, 2, 3).reshape(6, 6, 8)
        return h[torch.arange(6), rows]

    x = torch.randn(6, 6, 8)
    for model in (swapped, permuted):
        compiled = tov.compile(model, options={"min_partition_us": 0})
        with torch.no_grad():
            for rows in (torch.arange(6), torch.tensor([5, 0, 3, 3, 1, 4])):
                torch.testing.assert_close(compiled(x, rows), model(x, rows))
