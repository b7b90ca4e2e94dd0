"""An index beyond the end raises as in eager PyTorch: OpenVINO's Gather would answer zeros."""

import pytest
import torch
from torch import nn

import torchserve_openvino as tov


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, i):
        return self.table(i.reshape(-1, 1)[:, 0]) * 2


CASES = {
    "embedding": (Embeds(), lambda i: (i,), -1),
    "index": (lambda x, i: x[i] + 1, lambda i: (torch.ones(10, 2), i), -11),
    "index_select": (lambda x, i: torch.index_select(x, 0, i) + 1, lambda i: (torch.ones(10, 2), i), -1),
    "gather": (lambda x, i: torch.gather(x, 0, i[:, None].expand(-1, 2)) + 1, lambda i: (torch.ones(10, 2), i), -1),
    "scatter": (lambda x, i: torch.scatter(x, 0, i[:, None], x * 3) + 1, lambda i: (torch.ones(10, 2), i), -1),
}


@pytest.mark.parametrize("name", CASES)
def test_an_index_out_of_range_raises_and_the_rest_is_right(name) -> None:
    model, inputs, below = CASES[name]
    compiled = tov.compile(model)
    with torch.no_grad():
        for good in ([0, 9], [3, 3]):
            args = inputs(torch.tensor(good))
            torch.testing.assert_close(compiled(*args), model(*args))
        for bad in ([0, 10], [below, 3]):
            with pytest.raises((IndexError, RuntimeError)):
                compiled(*inputs(torch.tensor(bad)))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_a_negative_index_that_torch_takes_is_taken() -> None:
    compiled = tov.compile(lambda x, i: x[i] + 1)
    x = torch.arange(6.0)
    assert torch.equal(compiled(x, torch.tensor([-1, -6, 2])), x[torch.tensor([-1, -6, 2])] + 1)


def test_int32_indices_have_bounds_too() -> None:
    compiled = tov.compile(Embeds())
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(torch.tensor([1, 12], dtype=torch.int32))
