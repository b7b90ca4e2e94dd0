"""Helpers for backend tests: compare a compiled model with eager, leaf by leaf, and simulate failures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import torchserve_openvino as tov
from torchserve_openvino.backend import backend_settings
from torchserve_openvino.backend.capture import builder
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.ops.rule_registry import RULES, Rule

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-7}


def flat(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    if hasattr(value, "keys") and not isinstance(value, dict):
        value = dict(value)
    return pytree.tree_flatten(value)


def assert_same(got: Any, expected: Any, *, strides: bool = True) -> None:
    """Compares structure and leaves: types, shapes, strides, and values within the dtype's tolerance."""
    (got_leaves, got_structure), (expected_leaves, expected_structure) = flat(got), flat(expected)
    assert got_structure == expected_structure
    for a, b in zip(got_leaves, expected_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b and type(a) is type(b)
            continue
        assert a.dtype == b.dtype and a.shape == b.shape
        if strides:
            assert a.stride() == b.stride()
        tolerance = TOLERANCE.get(b.dtype, 0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(
    model: Callable[..., Any],
    *args: Any,
    coverage: float | None = 1.0,
    fallbacks: dict[str, int] | None = None,
    compiled: tov.CompiledModule | None = None,
    strides: bool = True,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = False,
    **kwargs: Any,
) -> tov.CompiledModule:
    """Compiles, calls twice, compares both answers with eager, and checks coverage and fallbacks."""
    if compiled is None:
        compiled = tov.compile(model, options=options, dynamic=dynamic)
    with torch.no_grad():
        expected = model(*args, **kwargs)
        for _ in range(2):
            assert_same(compiled(*args, **kwargs), expected, strides=strides)
    if coverage is not None:
        assert compiled.report.summary.coverage == coverage, compiled.report.to_text()
    assert compiled.report.fallback_counts() == (fallbacks or {}), compiled.report.to_text()
    return compiled


class Resized(torch.nn.Module):
    """Resizes something computed, and computes with the result."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x.neg(), **self.how) * 2


def break_conversion_of_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes OpenVINO's frontend fail on each graph with a tanh, as if its conversion rule were missing."""
    from torchserve_openvino.backend.conversion import convert as stage

    real = stage.fx_to_model

    def failing(gm: Any, *rest: Any) -> Any:
        if any("aten.tanh" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("No conversion rule found for operations: aten.tanh.default")
        return real(gm, *rest)

    monkeypatch.setattr(stage, "fx_to_model", failing)


def break_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes OpenVINO fail to compile each partition."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the plugin is on strike")

    monkeypatch.setattr(builder, "build", failing)


def break_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each inference of each partition fail, as if the device were gone."""

    def failing(self: CompiledPartition, request: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CompiledPartition, "_infer_direct", failing)


@contextmanager
def hypot_refused() -> Iterator[None]:
    """Removes the decomposition of hypot, which then runs in eager PyTorch, and whose formula can be written.

    Tests can't rely on a truly unsupported operator: a later version may support it.
    """
    with pytest.MonkeyPatch.context() as patch:
        replace_rule(patch, "aten.hypot.default", Rule())
        yield


def replace_rule(patch: pytest.MonkeyPatch, name: str, rule: Rule) -> None:
    """Replaces an operator's rule; models share a decomposition table, which knows the old one."""
    patch.setitem(RULES, name, rule)
    patch.setattr(backend_settings, "_unmapped_table", backend_settings._unmapped_table.__wrapped__)


def stick(monkeypatch: Any) -> None:
    """Makes each partition repeat its first answer, as if the first inputs were constants."""
    from torchserve_openvino.backend.runtime.execute import CompiledPartition

    right = CompiledPartition.run
    first: dict[int, tuple[Any, Any]] = {}

    def run(self: Any, args: Any) -> Any:
        # Also keeps the partition alive, so that its id is not reused.
        _, answer = first.setdefault(id(self), (self, right(self, args)))
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in answer]

    monkeypatch.setattr(CompiledPartition, "run", run)


def leave_unwritten(monkeypatch: Any) -> None:
    """Makes inferences write nothing: results are whatever was in the output memory."""
    import openvino as ov

    monkeypatch.setattr(ov.InferRequest, "infer", lambda *args, **kwargs: None)


def run_backend(model: Any, *inputs: Any, compiler: Any = None) -> list[Any]:
    """Passes each lowered graph of a model to ``compiler``; returns Dynamo's graphs with their inputs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(gm: Any, example_inputs: Any) -> Any:
        if compiler is not None:
            compiler(gm, example_inputs)
        return make_boxed_func(gm.forward)

    graphs: list[Any] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        graphs.append((gm, example_inputs))
        return aot_autograd(fw_compiler=keep)(gm, example_inputs)

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*inputs)
    return graphs
