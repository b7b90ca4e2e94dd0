"""Changes anywhere in a model between two guarded calls are noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from openvino import opset15 as ops
from torch import nn

import torchserve_openvino as tov


class Deep(nn.Module):
    """Two levels of modules with every kind of state, whose guards Dynamo skips while no dictionary tag changes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.act(x)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.settings, self.items = nn.Linear(4, 4), 2.0, {"a": {"b": 1.0}}, [1.0, 2.0]
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + self.settings["a"]["b"] + sum(self.items) + self.shift + self.plain
        return y if self.training else y * 2


def _other_shape(model: Any) -> None:
    part = model.parts[2]
    part.linear.weight.data, part.linear.bias.data = torch.randn(6, 4), torch.randn(6)
    part.shift.data, part.plain = torch.ones(6), torch.ones(6)


def _other_data(model: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = model.parts[1].linear.weight
    weight.data = view(weight.data)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda m: setattr(m.parts[1], "scale", 5.0),
    "a dict in a dict": lambda m: m.parts[1].settings["a"].update(b=7.0),
    "an item of a list": lambda m: m.parts[2].items.__setitem__(0, 9.0),
    "a longer list": lambda m: m.parts[2].items.append(9.0),
    "a buffer": lambda m: setattr(m.parts[0], "shift", torch.full((4,), 3.0)),
    "a buffer's data": lambda m: setattr(m.parts[0].shift, "data", torch.full((4,), 3.0)),
    "a plain tensor": lambda m: setattr(m.parts[0], "plain", torch.full((4,), 3.0)),
    "a parameter": lambda m: setattr(m.parts[0].linear, "weight", nn.Parameter(torch.randn(4, 4))),
    "other shapes by data": _other_shape,
    "no bias": lambda m: setattr(m.parts[1].linear, "bias", None),
    "training": lambda m: m.train(),
    "a part in training": lambda m: m.parts[1].train(),
    "another module": lambda m: setattr(m, "act", nn.Tanh()),
    "an item of a list of modules": lambda m: m.parts.__setitem__(1, Part().eval()),
    "one module more": lambda m: m.parts.append(Part().eval()),
    "a hook": lambda m: m.act.register_forward_hook(lambda module, args, output: output + 1),
    "a hook within": lambda m: m.parts[1].linear.register_forward_hook(lambda module, args, output: output + 1),
    "a patched forward": lambda m: setattr(m.act, "forward", lambda x: x * 3),
    "the same memory turned round": lambda m: _other_data(m, lambda w: w.t()),
    "the same memory, rows repeated": lambda m: _other_data(m, lambda w: w.as_strided((4, 4), (0, 1))),
    "turned round in place": lambda m: m.parts[1].linear.weight.data.t_(),
    "no gradient": lambda m: m.parts[0].linear.weight.requires_grad_(False),
}


@pytest.mark.quick(grad=[False])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_deep_in_the_model_is_seen(change: str, grad: bool) -> None:
    model, x = Deep().eval(), torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        compiled = tov.compile(model, options={"min_partition_us": 0})
        for _ in range(3):
            compiled(x)
        CHANGES[change](model)
        for _ in range(2):
            ours, theirs = compiled(x), model(x)
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
            assert ours.requires_grad == theirs.requires_grad
            if grad:
                weight = model.parts[0].linear.weight
                gradients = []
                for answer in (ours, theirs):
                    model.zero_grad()
                    answer.sum().backward()
                    gradients.append(weight.grad if weight.grad is None else weight.grad.clone())
                torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-3)


class Special(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Mapped(Deep):
    """As `Deep`, with a module that is converted by a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.special = Special()
        self.extra: nn.Module | None = nn.ReLU()
        self.mark = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.special(super().forward(x))
        return y + 1 if hasattr(self, "mark") else y


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    tov.register_op(Special)(lambda module, x: ops.multiply(x, ops.constant(np.float32(2))))
    yield Mapped().eval()
    tov.forget_mappings()


@pytest.mark.parametrize("change", ["another module", "an item of a list of modules", "one module more", "training"])
def test_a_change_of_a_model_with_a_mapped_module_is_seen(change: str, mapped: Mapped) -> None:
    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled = tov.compile(mapped, options={"min_partition_us": 0})
        for _ in range(3):
            compiled(x)
        CHANGES[change](mapped)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), mapped(x), atol=1e-3, rtol=1e-3)
        del mapped.mark, mapped.extra
        for _ in range(2):
            torch.testing.assert_close(compiled(x), mapped(x), atol=1e-3, rtol=1e-3)
        assert not hasattr(mapped, "mark") and not hasattr(mapped, "extra")
