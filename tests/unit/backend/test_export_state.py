"""Backend export: what `forward` reads outside the modules' own attributes is compared before each call."""

import collections
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov

THIS = sys.modules[__name__]
FACTOR = 1.0
TABLE = {"nested": [{"factor": 1.0}]}
COUNTED = 0
logger = logging.getLogger(__name__)


class Scale:
    s = 1.0

    def __init__(self) -> None:
        self.own = 1.0


class Inherited(Scale):
    """Has the attribute of its base."""


@dataclasses.dataclass(slots=True)
class Slotted:
    s: float = 1.0


class Private:
    __slots__ = ("__s",)

    def __init__(self) -> None:
        self.set(1.0)

    def set(self, s: float) -> None:
        self.__s = s

    def get(self) -> float:
        return self.__s


def from_global() -> float:
    logger.debug("read")
    return FACTOR


class Net(nn.Module):
    """Multiplies by a number that is read from somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.object, self.slotted, self.long = Scale(), Slotted(), [1.0] * 100
        self.private = Private()
        self.deep = {"a": [[[[[1.0]]]]]}
        self.array = np.ones(3, np.float32)
        self.queue = collections.deque([Scale()])
        self.partial = functools.partial(lambda s: s.own, Scale())
        self.read: Callable[[], Any] = lambda: 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.read())


def closure(net: Net) -> None:
    factor = 1.0

    def change() -> None:
        nonlocal factor
        factor = 3.0

    net.read, net.change = lambda: factor, change


def reads(net: Net, read: Callable[[], Any], change: Callable[[], None]) -> None:
    net.read, net.change = read, change


# Sets what a net reads, and how that is changed.
READ: dict[str, Callable[[Net, pytest.MonkeyPatch], None]] = {
    "class attribute": lambda n, p: reads(n, lambda: Scale.s, lambda: p.setattr(Scale, "s", 3.0)),
    "inherited": lambda n, p: reads(n, lambda: Inherited.s, lambda: p.setattr(Scale, "s", 3.0)),
    "shadowed": lambda n, p: reads(n, lambda: Inherited.s, lambda: p.setattr(Inherited, "s", 3.0, raising=False)),
    "object": lambda n, p: reads(n, lambda: n.object.own, lambda: setattr(n.object, "own", 3.0)),
    "new attribute": lambda n, p: reads(n, lambda: n.object.s, lambda: setattr(n.object, "s", 3.0)),
    "slot": lambda n, p: reads(n, lambda: n.slotted.s, lambda: setattr(n.slotted, "s", 3.0)),
    "private slot": lambda n, p: reads(n, n.private.get, lambda: n.private.set(3.0)),
    "long list": lambda n, p: reads(n, lambda: n.long[70], lambda: n.long.__setitem__(70, 3.0)),
    "deep": lambda n, p: reads(
        n, lambda: n.deep["a"][0][0][0][0][0], lambda: n.deep["a"][0][0][0][0].__setitem__(0, 3.0)
    ),
    "array": lambda n, p: reads(n, lambda: n.array[1], lambda: n.array.__setitem__(1, 3.0)),
    "queue": lambda n, p: reads(n, lambda: n.queue[0].own, lambda: setattr(n.queue[0], "own", 3.0)),
    "partial": lambda n, p: reads(n, lambda: n.partial(), lambda: setattr(n.partial.args[0], "own", 3.0)),
    "global": lambda n, p: reads(n, lambda: FACTOR, lambda: p.setattr(THIS, "FACTOR", 3.0)),
    "global of a function": lambda n, p: reads(n, from_global, lambda: p.setattr(THIS, "FACTOR", 3.0)),
    "nested global": lambda n, p: reads(
        n, lambda: TABLE["nested"][0]["factor"], lambda: p.setitem(TABLE["nested"][0], "factor", 3.0)
    ),
    "closure": lambda n, p: closure(n),
}


@pytest.mark.parametrize("name", READ)
def test_a_change_of_python_state_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net().eval(), torch.ones(1, 4)
    READ[name](net, monkeypatch)
    compiled = tov.compile(net, backend="export", options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x))
        assert compiled.report.summary.graphs == 1
        before = net(x)
        net.change()
        torch.testing.assert_close(net(x), 3 * before)
        torch.testing.assert_close(compiled(x), net(x))
    assert compiled.report.fallback_counts() == {}
    assert compiled.report.summary.graphs == 2


def test_a_model_that_counts_in_a_global_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            global COUNTED
            COUNTED += 1
            return torch.softmax(x, 1) * COUNTED

    monkeypatch.setattr(THIS, "COUNTED", 0)
    compiled, x = tov.compile(Counts().eval(), backend="export", options={"min_partition_us": 0}), torch.ones(2, 3)
    with torch.no_grad():
        for _ in range(3):
            result = compiled(x)
            torch.testing.assert_close(result, torch.softmax(x, 1) * COUNTED)
    assert compiled.report.fallback_counts() == {"conversion_failed": 3}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("ends", [[3, 6], [6, 6], [1, 5]])
def test_padded_encoders_have_zeros_at_padded_positions(ends: list[int], norm: bool, twice: bool) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if norm else None)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.encoder(x, src_key_padding_mask=mask)
            # A layer that is called by itself leaves the padding as it is.
            return self.encoder.layers[-1](x, src_key_padding_mask=mask) if twice else x

    torch.manual_seed(0)
    model = Padded().eval()
    x, mask = torch.randn(2, 6, 16), torch.arange(6)[None] >= torch.tensor(ends)[:, None]
    compiled = tov.compile(model, backend="export", options={"min_partition_us": 0})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, mask), model(x, mask), atol=1e-5, rtol=1e-5)
    assert not model.encoder.layers[-1]._forward_hooks
    assert compiled.report.fallback_counts() == {}


def test_a_global_with_the_name_of_an_attribute_is_searched_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return self.cell(x, h)

    model, x, h = Cell().eval(), torch.randn(1, 4), torch.randn(1, 4)
    compiled = tov.compile(model, backend="export")
    # A compiled model is no state of the model's, though its name occurs in the code.
    monkeypatch.setitem(globals(), "cell", compiled)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, h), model(x, h))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallback_counts()
    monkeypatch.setitem(globals(), "cell", [[number] for number in range(200_000)])
    again = tov.compile(model, backend="export")
    with torch.no_grad():
        torch.testing.assert_close(again(x, h), model(x, h))
    assert "reaches more than 100000 Python objects" in str(again.report.to_dict()["fallbacks"])
