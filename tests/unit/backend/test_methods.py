"""Methods that are reached through a compiled module: compiled if they are named, else counted."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov
from torchserve_openvino.errors import ConfigError

OPTIONS = {"min_partition_us": 0}


class Net(nn.Module):
    """Two towers, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)

    def encode_image(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.softmax(self.image(x) * scale, 1)

    def encode_text(self, x: Tensor) -> Tensor:
        return torch.softmax(self.text(x), 1)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.encode_image(image) @ self.encode_text(text).t()

    def size(self) -> int:
        return sum(each.numel() for each in self.parameters())

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self(x, torch.ones(2, 5)).sum()
        return x


def line() -> int:
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    return frame.f_lineno


X, TEXT = torch.linspace(-1, 1, 8).reshape(2, 4), torch.linspace(-1, 1, 10).reshape(2, 5)


@pytest.mark.parametrize("name", ["encode_image", "generate"])
def test_a_method_that_is_not_compiled_is_counted_with_the_callers_line(name: str) -> None:
    model = Net().eval()
    compiled = tov.compile(model, options=OPTIONS)
    with torch.no_grad():
        for _ in range(2):
            result, where = getattr(compiled, name)(X), line()
            torch.testing.assert_close(result, getattr(model, name)(X))
    (fallback,) = compiled.report.fallbacks
    assert (fallback.kind, fallback.op, fallback.count) == ("outside_compiled", f"Net.{name}", 2)
    assert fallback.where == f"{Path(__file__)}:{where}"
    assert compiled.report.summary.coverage == 0
    assert compiled.report.to_dict()["outside"] == {
        f"Net.{name} at {fallback.where}": compiled.report.summary.ops_total
    }


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("freeze", [False, True])
def test_a_method_that_is_named_is_compiled(backend: str, freeze: bool) -> None:
    model = Net().eval()
    compiled = tov.compile(model, backend=backend, options=OPTIONS, methods=["encode_image", "encode_text"])
    with torch.no_grad():
        if freeze:
            compiled.freeze()
        for _ in range(3):
            torch.testing.assert_close(compiled.encode_image(X, scale=2.0), model.encode_image(X, scale=2.0))
            torch.testing.assert_close(compiled.encode_text(TEXT), model.encode_text(TEXT))
            torch.testing.assert_close(compiled(X, TEXT), model(X, TEXT))
        if not freeze:
            model.image.weight.mul_(2)
            torch.testing.assert_close(compiled.encode_image(X), model.encode_image(X))
    assert compiled.report.fallback_counts() == {}
    assert compiled.report.summary.coverage == 1.0


def test_forward_is_the_compiled_call_unless_a_hook_makes_them_differ() -> None:
    model = Net().eval()
    compiled = tov.compile(model, options=OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(compiled.forward(X, TEXT), model(X, TEXT))
        assert compiled.report.fallback_counts() == {}
        assert compiled.report.summary.coverage == 1.0
        model.register_forward_hook(lambda module, args, result: result + 1)
        torch.testing.assert_close(compiled.forward(X, TEXT), model.forward(X, TEXT))
        torch.testing.assert_close(compiled(X, TEXT), model.forward(X, TEXT) + 1)
    assert compiled.report.fallback_counts() == {"outside_compiled": 1}


def test_methods_that_compute_nothing_are_not_counted() -> None:
    compiled = tov.compile(Net().eval(), options=OPTIONS)
    assert compiled.size() == 33
    assert compiled.eval() is compiled
    assert compiled.to(torch.float32) is compiled
    assert len(compiled.state_dict()) == 4
    assert compiled.report.fallback_counts() == {}


def test_what_a_compiled_part_computes_in_a_method_is_not_counted() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.run = tov.compile(nn.Linear(4, 4).eval(), options=OPTIONS)

        def encode(self, x: Tensor) -> Tensor:
            return self.run(x)

    model = Outer().eval()
    compiled = tov.compile(model, options=OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(compiled.encode(X), model.run.eager(X))
    assert compiled.report.fallback_counts() == {}
    assert model.run.report.summary.coverage == 1.0


def test_a_method_becomes_part_of_a_model_that_calls_it() -> None:
    inner = tov.compile(Net().eval(), options=OPTIONS)
    outer = tov.compile(lambda x: inner.encode_image(x) + 1, options=OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(outer(X), inner.eager.encode_image(X) + 1)
    assert outer.report.summary.coverage == 1.0
    assert inner.report.fallback_counts() == {}


@pytest.mark.parametrize("name", ["encode_audio", "train", "image"])
def test_a_name_that_is_no_method_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        tov.compile(Net().eval(), methods=[name])
