"""State that a call changes is as after one call; a backend that is gone names its replacement."""

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.errors import ConfigError


def test_the_backend_auto_names_its_replacement() -> None:
    with pytest.raises(ConfigError, match="torchserve-openvino tune.*openvino, openvino_ts, export"):
        tov.compile(nn.Linear(2, 2), backend="auto")


class Stream(nn.Module):
    """Keeps state in an attribute, a list, a dictionary, a reassigned buffer, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.items, self.table, self.calls = torch.zeros(1), [torch.zeros(1)], {"h": torch.zeros(1)}, 0
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("written", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.h = self.h + x.sum()
        self.n = self.n + 1
        self.written += 2
        self.items.append(self.h * 2)
        self.table["h"] = self.table["h"] + 1
        return self.h + self.n + self.items[-1] + self.table["h"] + self.written + self.calls


class Decaying(nn.Module):
    """Writes to its weight."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.weight, self.by_data = nn.Parameter(torch.ones(3)), by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_data:
            self.weight.data = self.weight.data * 0.5
        else:
            self.weight.mul_(0.5)
        x.add_(1)
        return x * self.weight


STATEFUL = {"attributes": Stream, "weight": lambda: Decaying(False), "weight.data": lambda: Decaying(True)}


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("backend", ["export", "openvino"])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_after_a_call_is_that_of_one_call(name: str, backend: str, freezes: bool) -> None:
    model, twin = STATEFUL[name]().eval(), STATEFUL[name]().eval()
    compiled = tov.compile(model, backend=backend)
    if freezes:
        compiled.freeze()
    with torch.no_grad():
        for n in range(4):
            x = torch.full((3,), float(n))
            y = x.clone()
            assert_same(compiled(x), twin(y))
            assert_same(x, y)
            for kept, other in vars(twin).items():
                assert_same(getattr(model, kept), other)
    assert compiled.frozen == 0
    if backend == "export" and name != "weight":
        assert compiled.report.fallback_counts()["conversion_failed"] == 4
