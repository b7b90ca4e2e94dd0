"""Operands without elements, which contribute nothing and must not cut a graph."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import check

SPLIT = {"min_partition_us": 0}


class FullRotary(nn.Module):
    """As Phi-3 and GPT-J rotate: the part of a head that is not rotated is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.cat([y[..., :256] * 2, torch.sin(y[..., 256:])], -1) + x
        return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
def test_an_empty_operand_of_cat_does_not_cut_the_graph(backend: str, dynamic: bool) -> None:
    model, x = FullRotary().eval(), torch.randn(2, 500, 256)
    compiled = tov.compile(model, dynamic=dynamic, backend=backend)
    check(model, x, compiled=compiled)
    assert compiled.report.summary.partitions == 1


def test_an_empty_operand_of_cat_in_an_exported_graph() -> None:
    model, x = FullRotary().eval(), torch.randn(2, 33, 256)
    compiled = check(model, x, compiled=tov.compile(model, backend="export"))
    assert compiled.report.summary.partitions == 1


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 4, 8, -1).to(memory_format=torch.channels_last)


CATS: dict[str, Callable[[torch.Tensor], object]] = {
    "returned": lambda x: torch.cat([x, x[:, :0]], 1),
    "views of it": lambda x: (torch.cat([x, x[:, :0]], 1)[:, :3], torch.cat([x, x[:, :0]], 1).t()),
    "of one dimension": lambda x: torch.cat([torch.tensor([]), x * 2], -1),
    "of a wider type": lambda x: torch.cat([torch.tensor([]), x > 0, torch.tensor([])], 1),
    "several others": lambda x: torch.cat([x * 2, x[:, :0], x], 1),
    "of another order": lambda x: torch.cat([_channels_last(x) * 2, torch.zeros(2, 0, 8, 8)], 1),
    "all empty": lambda x: (torch.cat([x[:, :0], x[:, 128:]], 1), x + 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CATS)
def test_cat_is_its_other_operands(name: str, dynamic: bool) -> None:
    compiled = check(CATS[name], torch.randn(4, 128), dynamic=dynamic, options=SPLIT)
    assert compiled.report.summary.partitions == 1


def test_a_wider_type_of_an_empty_operand_among_several_is_refused() -> None:
    """The others would have to be cast one by one."""
    model = lambda x: torch.cat([torch.tensor([]), x.half(), x.half()], 1)
    compiled = check(model, torch.randn(4, 8), options=SPLIT, coverage=None, fallbacks={"unsupported_op": 1})
    assert "nothing to compute" in compiled.report.fallbacks[0].reason


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_to_no_element_is_a_copy(dynamic: bool) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nowhere = torch.zeros(0, dtype=torch.int64)
        sliced, put = x * 2, x * 3
        sliced[:, :0] = 1
        put[nowhere] = 5
        added, filled = x.index_add(0, nowhere, x[:0]), x.index_fill(0, nowhere, 5)
        return sliced, put, added, filled, x.scatter(1, torch.zeros(4, 0, dtype=torch.int64), x)

    check(model, torch.randn(4, 128), dynamic=dynamic, options=SPLIT)


def test_an_empty_result_is_no_operator() -> None:
    compiled = check(lambda x: (torch.relu(x @ x.t())[:, :0] * 2, x + 1), torch.randn(4, 128), options=SPLIT)
    assert compiled.report.summary.ops_total == 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_pass_a_cat_with_an_empty_operand(dynamic: bool) -> None:
    model = lambda x: torch.cat([x * 2, x[:, :0]], 1).sin().sum()
    x = torch.randn(4, 128, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x), x)
    (got,) = torch.autograd.grad(tov.compile(model, dynamic=dynamic, options=SPLIT)(x), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_copies_of_one_value_are_returned_apart(dynamic: bool) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.clone(), y, y.clone().clone()

    compiled = check(model, torch.randn(4, 128), dynamic=dynamic)
    results = compiled(torch.ones(4, 128))
    results[0].zero_()
    results[1].fill_(1.0)
    assert [float(each.mean()) for each in results] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_to_no_column(dynamic: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, torch.zeros(0, dtype=torch.int64)] = 5
        return y + 1

    check(model, torch.randn(4, 128), dynamic=dynamic, options=SPLIT)
