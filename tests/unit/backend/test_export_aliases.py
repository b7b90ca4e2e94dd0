"""The backend export: outputs that share memory with a mutated input or buffer, as in eager."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchserve_openvino as tov


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("b", torch.zeros(4))

    def forward(self, x):
        return self.function(x, self.b)


def diagonal(x, b):
    square = x.view(2, 2)
    square.diagonal().fill_(1)
    return square.flatten()


CASES = {
    "view": lambda x, b: (x.unsqueeze(-1), x.unbind(-1)[1].clamp_(min=0))[0],
    "slice and transpose": lambda x, b: (x[0:2].mul_(3), x.view(2, 2).t(), x.sum()),
    "buffer": lambda x, b: (b.add_(1), b[1:], x + 1),
    "one of several": lambda x, b: (b.add_(1), b.view(2, 2).unbind(0)[1], x + 1),
    "written twice": lambda x, b: x.add_(1).relu_().view(2, 2),
}


def shares(tensor, other) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_a_view_of_what_was_written_to(name) -> None:
    eager, model = (Model(CASES[name]).eval() for _ in range(2))
    compiled = tov.compile(model, backend="export", options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(2):
            given = torch.randn(4)
            own = given.clone()
            expected, got = eager(given), compiled(own)
            torch.testing.assert_close((got, own, model.b), (expected, given, eager.b), rtol=0, atol=0)
            for theirs, ours in zip(*(pytree.tree_leaves(each) for each in (expected, got)), strict=True):
                assert (ours.stride(), ours.storage_offset()) == (theirs.stride(), theirs.storage_offset())
                assert (shares(ours, own), shares(ours, model.b)) == (shares(theirs, given), shares(theirs, eager.b))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


@pytest.mark.parametrize("view", [lambda x: x.detach(), lambda x: x.view(2, 2).t()])
def test_an_answer_that_is_returned_twice_is_one_tensor(view) -> None:
    def function(x, b):
        made = view(x.mul_(2))
        return made, x + 1, made

    compiled = tov.compile(Model(function).eval(), backend="export", options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(2):
            own = torch.randn(4)
            first, _, last = compiled(own)
            assert first is last and shares(first, own)


def test_a_view_through_another_view_is_refused() -> None:
    eager, model = (Model(diagonal).eval() for _ in range(2))
    compiled = tov.compile(model, backend="export")
    with torch.no_grad():
        given = torch.randn(4)
        own = given.clone()
        torch.testing.assert_close((compiled(own), own), (eager(given), given), rtol=0, atol=0)
        assert shares(compiled(own), own)
    assert "through another view" in compiled.report.fallbacks[0].reason


def test_inputs_that_share_memory_are_not_those_that_do_not() -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return b * 2

    compiled = tov.compile(Adds().eval(), backend="export")
    with torch.no_grad():
        assert compiled(torch.zeros(4), torch.zeros(4)).tolist() == [0, 0, 0, 0]
        a = torch.zeros(4)
        assert compiled(a, a.view(4)).tolist() == [2, 2, 2, 2]
        assert a.tolist() == [1, 1, 1, 1]
    assert "share memory" in str(compiled.report.to_dict()["fallbacks"])
