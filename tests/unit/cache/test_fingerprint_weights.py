"""A model's digests cover its weights, wherever they are kept; what cannot be digested is reported as unknown."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fingerprint_helpers import holding, net, tell_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.cache.identity.fingerprint import fingerprint

# --- weights ----------------------------------------------------------------------------------------------------


def test_a_text_that_raises_does_not_stop_the_model() -> None:
    class Rude:
        __slots__ = ()

        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert fingerprint(holding(Rude())).unknown


def weights(model: nn.Module) -> str:
    return fingerprint(model).weights


def with_buffer(tensor: torch.Tensor, persistent: bool = True) -> nn.Module:
    model = nn.Module()
    model.register_buffer("b", tensor, persistent=persistent)
    return model


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
          torch.complex64, torch.uint8, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_content(dtype: torch.dtype, persistent: bool) -> None:
    zeros, ones = (with_buffer(torch.full((3, 2), value).to(dtype), persistent) for value in (0.0, 1.0))
    assert weights(zeros) == weights(with_buffer(torch.zeros(3, 2).to(dtype), persistent)) != weights(ones)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_byte_of_any_weight(data: st.DataObject) -> None:
    model = net()
    before = weights(model)
    name, tensor = data.draw(st.sampled_from(sorted(model.named_parameters(), key=lambda pair: pair[0])))
    raw = tensor.detach().view(-1).view(torch.uint8)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert weights(model) != before, name
    raw[place] ^= 1 << bit
    assert weights(model) == before


def test_shape_dtype_strides_and_names_count() -> None:
    base = torch.arange(6.0)
    found = {
        weights(with_buffer(base.clone())),
        weights(with_buffer(base.reshape(2, 3))),
        weights(with_buffer(base.reshape(3, 2))),
        weights(with_buffer(base.reshape(2, 3).t().contiguous().t())),
        weights(with_buffer(base.view(torch.int32))),
    }
    assert len(found) == 5
    other = nn.Module()
    other.register_buffer("c", base.clone())
    assert weights(other) not in found


def test_tensors_that_are_not_contiguous_count_by_what_they_show() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert weights(with_buffer(whole[:, :2])) == weights(with_buffer(whole[:, :2]))
    seen = weights(with_buffer(whole[:, :2]))
    changed = whole.clone()
    changed[2, 3] = 100
    assert weights(with_buffer(changed[:, :2])) == seen
    changed[2, 1] = 100
    assert weights(with_buffer(changed[:, :2])) != seen
    assert weights(with_buffer(torch.ones(1).expand(4))) != weights(with_buffer(torch.zeros(1).expand(4)))


def test_two_views_of_one_storage_do_not_hide_each_other() -> None:
    def model(data: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("a", data[:2])
        made.register_buffer("b", data[:3])
        return made

    assert weights(model(torch.tensor([1.0, 2, 3]))) != weights(model(torch.tensor([1.0, 2, 4])))


def test_tied_weights() -> None:
    def tied(value: float) -> nn.Module:
        model = nn.Module()
        model.a = nn.Linear(3, 3, bias=False)
        nn.init.constant_(model.a.weight, value)
        model.b = nn.Linear(3, 3, bias=False)
        model.b.weight = model.a.weight
        return model

    assert weights(tied(1)) == weights(tied(1)) != weights(tied(2))
    untied = tied(1)
    untied.b.weight = nn.Parameter(torch.full((3, 3), 1.0))
    assert weights(untied) != weights(tied(1))


def test_empty_tensors() -> None:
    sizes = [(0,), (0, 3), (3, 0)]
    found = {weights(with_buffer(torch.empty(size))) for size in sizes}
    assert len(found) == len(sizes)


def unusual() -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "meta": lambda: torch.empty(3, device="meta"),
        "conj": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj(),
        "neg": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "one of several": lambda: torch.ones(4)[::4],
    }


@pytest.mark.parametrize("kind", unusual())
@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_unusual_tensors_do_not_stop_the_model(kind: str, place: str) -> None:
    tensor = unusual()[kind]()
    found = fingerprint(with_buffer(tensor) if place == "buffer" else holding(tensor))
    assert bool(found.unknown) is (kind in {"sparse", "csr", "meta", "quantized"})


def test_content_of_a_sparse_attribute() -> None:
    first, second = (fingerprint(holding(torch.full((3,), value).to_sparse())) for value in (1.0, 2.0))
    assert tell_apart([first, second])


class Inner(nn.Module):
    def __init__(self, value: float, kind: str) -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("w", torch.full((3,), value))
        else:
            self.w = nn.Parameter(torch.full((3,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("how", ["closure", "bound method", "list", "partial", "object"])
def test_weights_of_modules_that_are_not_registered(kind: str, how: str) -> None:
    def made(value: float) -> Any:
        inner = Inner(value, kind)
        if how == "closure":
            return lambda x: inner(x)
        if how == "bound method":
            return inner.forward
        if how == "partial":
            return functools.partial(inner)
        return holding([inner] if how == "list" else types.SimpleNamespace(inner=inner))

    assert tell_apart([fingerprint(made(1.0)), fingerprint(made(2.0))])


# --- what can't be described ------------------------------------------------------------------------------------


class Opaque:
    """Has no attributes, slots or repr of its own."""

    __slots__ = ()


def test_the_unknown_is_named() -> None:
    found = fingerprint(holding({"deep": [Opaque()]}))
    assert len(set(found.unknown)) == 1 and "extra['deep'][0]" in found.unknown[0] and "Opaque" in found.unknown[0]
    assert "generator" in fingerprint(holding(i for i in [1])).unknown[0]
    assert fingerprint(holding(torch.Generator())).unknown


def test_a_model_with_something_unknown_is_traced_and_still_takes_its_partitions(tmp_path: Path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "c")}
    x = torch.randn(2, 4)
    for process in range(2):
        torch.compiler.reset()
        model = holding(Opaque())
        compiled = tov.compile(model, options=options).freeze()
        with torch.no_grad():
            for _ in range(3):
                assert_same(compiled(x), model(x))
        cache = compiled.report.to_dict()["cache"]
        assert any("Opaque" in reason for reason in cache["refused"])
        assert cache["traces"] == 1 and cache["calls"] == {"hits": 0, "misses": 0}
        assert (cache["hits"], cache["imports"], cache["compiles"]) == ((0, 0, 1) if process == 0 else (1, 1, 0))
