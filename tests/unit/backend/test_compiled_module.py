"""CompiledModule in place of the model: methods that return the model, copies, and use as a submodule."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.errors import WeightsReleasedError

BACKENDS = ["openvino", "export"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


RETURNING: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.bfloat16),
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "apply": lambda m: m.apply(lambda module: None),
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RETURNING)
def test_methods_that_return_the_model_return_the_compiled_one(name: str, backend: str) -> None:
    model = net()
    compiled = tov.compile(model, backend=backend)
    assert RETURNING[name](compiled) is compiled
    twin = net()
    RETURNING[name](twin)
    assert model.training == twin.training
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.dtype, mine.requires_grad) == (other.dtype, other.requires_grad)


def test_what_else_is_the_models_stays_the_models() -> None:
    model = net()
    compiled = tov.compile(model)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert compiled.get_submodule("0") is model[0]
    assert not compiled.training


def test_an_attribute_that_is_set_is_the_models() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    compiled = tov.compile(Scaled())
    x = torch.ones(2)
    assert_same(compiled(x), x * 2)
    compiled.scale = 5.0
    assert_same(compiled(x), x * 5)


def copies(compiled: Any) -> dict[str, Any]:
    return {
        "deepcopy": copy.deepcopy(compiled),
        "copy": copy.copy(compiled),
        "pickle": pickle.loads(pickle.dumps(compiled)),
    }


@pytest.mark.parametrize("backend", [*BACKENDS, "aot_eager"])
def test_copies_are_compiled_models_of_their_own(backend: str) -> None:
    options = None if backend == "aot_eager" else {"disabled_ops": ["aten.relu"]}
    compiled = tov.compile(net(), backend=backend, options=options)
    if backend != "aot_eager":
        compiled.freeze()
    x = torch.randn(2, 4)
    with torch.inference_mode():
        expected = compiled(x)
    graphs = compiled.report.summary.graphs
    others = copies(compiled)
    with torch.inference_mode():
        for name, other in others.items():
            assert isinstance(other, tov.CompiledModule) and other.report.summary.graphs == 0
            assert (other.eager is compiled.eager) == (name == "copy")
            for _ in range(2):
                assert_same(other(x), expected)
            assert other.frozen == int(backend != "aot_eager")
            assert other.report.fallback_counts() == compiled.report.fallback_counts()
    assert compiled.report.summary.graphs == graphs


def test_a_copy_has_weights_of_its_own() -> None:
    compiled = tov.compile(net())
    other = copy.deepcopy(compiled)
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = compiled(x)
        other.eager[0].weight.zero_()
        assert_same(compiled(x), expected)
        assert_same(other(x), other.eager(x))


def test_without_weights_there_is_no_copy() -> None:
    compiled = compile_with(net(), CompileSpec(own_weights=True)).freeze()
    x = torch.randn(2, 4)
    with torch.inference_mode():
        compiled(x), compiled(x)
    compiled.release_weights()
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(WeightsReleasedError):
            way(compiled)


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).relu())


@pytest.mark.quick(inner_backend=["openvino"])
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("inner_backend", BACKENDS)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_as_a_part_of_another_model(backend: str | None, inner_backend: str, freezes: bool) -> None:
    model = net()
    inner = tov.compile(model, backend=inner_backend)
    outer = Outer(inner).eval()
    plain = Outer(model).eval()
    plain.last = outer.last
    called = outer if backend is None else tov.compile(outer, backend=backend)
    if freezes:
        inner.freeze()
        if backend is not None:
            called.freeze()
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2, 4)
            assert_same(called(x), plain(x))
    if backend is None:
        # Called from eager PyTorch, the inner model runs compiled and has its own report.
        assert inner.report.summary.coverage == 1.0
        assert inner.frozen == int(freezes)
    else:
        assert called.report.summary.coverage == 1.0 and called.report.fallback_counts() == {}
        assert called.report.summary.ops_total >= 5 and called.frozen == int(freezes)


def test_compiling_a_compiled_model_compiles_the_model() -> None:
    compiled = tov.compile(tov.compile(net()))
    assert isinstance(compiled.eager, nn.Sequential)


def test_global_hooks_are_called_as_often_as_in_eager() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        compiled, x = tov.compile(model), torch.ones(2, 3)
        with torch.no_grad():
            model(x)
            eager, seen[:] = list(seen), []
            compiled(x)
            assert seen == eager
    finally:
        handle.remove()


def test_a_part_of_another_model_is_reported_at_the_users_line() -> None:
    inner = tov.compile(torch.nn.Linear(3, 3).eval())

    def outer(x):
        return inner(x) * 2

    compiled = tov.compile(outer, options={"disabled_ops": ["aten.addmm"]})
    with torch.no_grad():
        compiled(torch.ones(2, 3))
    places = {fallback.op: fallback.where for fallback in compiled.report.fallbacks}
    assert places["aten.addmm.default"].startswith(f"{__file__}:")
