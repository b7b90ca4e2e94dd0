"""Outputs that share memory with each other or with an input have the gradients of eager, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torchserve_openvino as tov

ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "detached beside a view": lambda v: (v.detach(), v.unsqueeze(0)),
    "detached beside itself": lambda v: (v, v.detach()),
    "detached, and its view, beside a view": lambda v: (v.detach(), v.detach().view(-1), v.t()),
    "detached view beside computed": lambda v: (v[:, 1:].detach(), v * 2),
    "detached twice": lambda v: (v.detach(), v.detach(), v.exp()),
    "detached and used again": lambda v: ((v.detach() * v).sum(-1), v.detach().t()),
    "views": lambda v: (v.t(), v[0], v.view(-1)[2:]),
    "chunks": lambda v: [t * (i + 1) if i else t for i, t in enumerate(v.chunk(2))],
    "without gradient inside": lambda v: (v.argmax(-1), v > 0, v.round().detach(), v.unsqueeze(-1)),
}


class Scaled(nn.Module):
    """Applies a function to a computed value, or to the input itself."""

    def __init__(self, answers: Callable[[Tensor], Any], computed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5))
        self.answers, self.computed = answers, computed

    def forward(self, x: Tensor) -> Any:
        return self.answers((x * self.weight).softmax(-1)) if self.computed else (self.answers(x), x * self.weight)


@pytest.mark.quick(computed=[True], dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_share_memory(name: str, backend: str, computed: bool, dynamic: bool) -> None:
    model = Scaled(ANSWERS[name], computed).eval()
    compiled = tov.compile(model, backend=backend, dynamic=dynamic, options={"min_partition_us": 0})
    for rows in (4, 4, 6):
        found = []
        for run in (model, compiled):
            x = torch.arange(rows * 5.0).reshape(rows, 5).sin().requires_grad_()
            model.zero_grad()
            answers = pytree.tree_leaves(run(x))
            wanting = [t for t in answers if t.requires_grad]
            sum((t.square() * (i + 1)).sum() for i, t in enumerate(wanting)).backward()  # type: ignore[union-attr]
            found.append(([t.requires_grad for t in answers], [t.detach() for t in answers], x.grad, model.weight.grad))
        torch.testing.assert_close(found[1], found[0])
    assert backend == "openvino_ts" or not compiled.report.fallbacks


class WritesToAnAnswer(nn.Module):
    """Writes to what one graph answers, in the next."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x + x).sin()
        torch._dynamo.graph_break()
        y[:, -1] = 0
        return y * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_an_answer_can_be_written_to(dtype: torch.dtype, dynamic: bool | None) -> None:
    """Autograd refuses that for a view that was made inside of a graph."""
    compiled = tov.compile(WritesToAnAnswer(), dynamic=dynamic, options={"min_partition_us": 0})
    for rows in (3, 5, 4):
        x = torch.linspace(-1, 1, rows * 4).view(rows, 4).to(dtype)
        given, expected = (x.clone().requires_grad_() for _ in range(2))
        got, wanted = compiled(given), WritesToAnAnswer()(expected)
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(given.grad, expected.grad)
    assert compiled.report.summary.coverage > 0.5
