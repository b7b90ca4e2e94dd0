"""Inputs that are tensors of another kind: the answer is eager's, or the fallback is counted."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov


class Image(Tensor):
    """A subclass without any behavior."""


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def smooth(x: Tensor) -> Tensor:
    return (x * 2 + 1).softmax(1)


X = torch.linspace(-2, 2, 12).reshape(3, 4)
EYE, RIGHT = torch.eye(4), torch.linspace(0, 1, 12).reshape(4, 3)
# The function, and its inputs.
INPUTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "subclass": (smooth, lambda: (X.as_subclass(Image),)),
    "view of a subclass": (smooth, lambda: (X.as_subclass(Image).t(),)),
    "subclass, partly in eager": (lambda x: smooth(x.cummax(1)[0]), lambda: (X.as_subclass(Image),)),
    "parameter": (smooth, lambda: (nn.Parameter(X, requires_grad=False),)),
    "CSR": (lambda a, b: a @ b + 1, lambda: (EYE.to_sparse_csr(), RIGHT)),
    "CSC": (lambda a, b: a.to_dense() @ b + 1, lambda: (EYE.to_sparse_csc(), RIGHT)),
    "BSR": (lambda a, b: a.to_dense() @ b + 1, lambda: (EYE.to_sparse_bsr((2, 2)), RIGHT)),
    "COO": (lambda a, b: a @ b + 1, lambda: (EYE.to_sparse(), RIGHT)),
    "nested": (lambda x: (x * 2).to_padded_tensor(0.0), lambda: (torch.nested.nested_tensor([X[:, :2], X[:2, :2]]),)),
    "quantized": (lambda x: x.dequantize() * 2, lambda: (torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),)),
    "conjugate": (lambda x: (x * 2).abs() + x.imag, lambda: (torch.complex(X, X + 1).conj(),)),
    "negative view": (smooth, lambda: (torch.complex(X, X + 1).conj().imag,)),
    "expanded": (smooth, lambda: (X[:, :1].expand(3, 4),)),
    "overlapping": (smooth, lambda: (X.as_strided((3, 4), (1, 1)),)),
}  # fmt: skip


@pytest.mark.quick(backend=["openvino"])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_of_another_kind_is_answered_as_in_eager_or_counted(name: str, backend: str, freeze: bool) -> None:
    function, inputs = INPUTS[name]
    model = Calls(function).eval()
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if freeze:
            compiled.freeze()
        for _ in range(3):
            result, expected = compiled(*inputs()), model(*inputs())
            assert type(result) is type(expected)
            torch.testing.assert_close(result.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert compiled.report.summary.ops_on_openvino or compiled.report.fallback_counts()


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_the_scale_of_a_quantized_input_is_not_kept(backend: str) -> None:
    model = Calls(lambda x: x.dequantize() * 2).eval()
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0}).freeze()
    with torch.no_grad():
        for scale in (0.1, 0.1, 0.1, 0.2):
            x = torch.quantize_per_tensor(X, scale, 0, torch.quint8)
            torch.testing.assert_close(compiled(x), model(x))


def test_weights_may_be_of_a_subclass() -> None:
    class Weight(nn.Parameter):
        """A subclass without any behavior."""

    model = nn.Linear(4, 4).eval()
    model.weight = Weight(model.weight.detach())
    compiled = tov.compile(model, options={"min_partition_us": 0})
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
        model.weight.mul_(2)
        torch.testing.assert_close(compiled(X), model(X))
    assert compiled.report.summary.coverage == 1.0


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_the_copy_of_a_complex_tensor_has_its_own_memory(backend: str) -> None:
    z = torch.complex(X, X + 1)
    compiled = tov.compile(lambda z: (z.clone(), z * 2), backend=backend, options={"min_partition_us": 0})
    for _ in range(2):
        with torch.no_grad():
            copy, double = compiled(z)
        copy.zero_()
        torch.testing.assert_close(double, torch.complex(X, X + 1) * 2)
        torch.testing.assert_close(z, torch.complex(X, X + 1))


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_a_buffer_with_the_negative_bit(backend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("part", torch.complex(X, X + 1).conj().imag)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.part + 1).sin()

    model = Model()
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(X), model(X))
        model.part.mul_(2)
        torch.testing.assert_close(compiled(X), model(X))


def test_an_exported_graph_tells_a_conjugate() -> None:
    model = lambda z: (z.imag * 2 + z.real, z.is_conj())
    compiled = tov.compile(model, backend="export", options={"min_partition_us": 0})
    z = torch.complex(X, X + 1)
    with torch.no_grad():
        for value in (z, z.conj(), z, z.conj().imag + z):
            torch.testing.assert_close(compiled(value), model(value))


ALIASING = {
    "a round trip of casts": (lambda x: x.double().float().chunk(2), lambda: (X.clone(),)),
    "a round trip, unbound": (lambda x: x.double().float().unbind(0), lambda: (X.clone(),)),
    "a part": (lambda a, b: torch.complex(a, b).real.chunk(2), lambda: (X.clone(), X + 1)),
}


@pytest.mark.parametrize("name", ALIASING)
def test_parts_of_a_copy_are_no_parts_of_an_input(name: str) -> None:
    model, make = ALIASING[name]
    compiled, args = tov.compile(model, options={"min_partition_us": 0}), make()
    with torch.no_grad():
        for _ in range(2):
            before = [arg.clone() for arg in args]
            compiled(*args)[0].add_(1)
            assert all(map(torch.equal, args, before))


GAPPED = {
    "a round trip of casts": (lambda x: torch.erfinv(x[:, :2].double().float().reshape(-1)), lambda: (X / 100,)),
    "a part": (
        lambda a, b: torch.erfinv(torch.complex(a.t(), b.t()).real.reshape(-1)), lambda: (X / 100, X / 100 + 0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GAPPED)
def test_a_view_of_a_copy_is_possible(name: str) -> None:
    model, make = GAPPED[name]
    compiled = tov.compile(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*make()), model(*make()))


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_the_first_of_as_many_as_the_values_say(backend: str) -> None:
    model = lambda x: x + torch.where(x > 0)[0][0]
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for value in (X, -X, X.flip(0)):
            torch.testing.assert_close(compiled(value), model(value))
