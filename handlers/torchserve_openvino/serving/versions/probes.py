"""Tries what this package relies on in torch, OpenVINO, TorchServe and transformers, each in seconds.

They are short forms of tests/contract, which need no test framework: private names are imported, and small models run
through each part of the backend that depends on them, compared with eager PyTorch and by what the report says.
"""

import importlib
import pkgutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchserve_openvino.backend import CompiledModule, compile, upstream
from torchserve_openvino.serving.versions.tested import TESTED, installed


@dataclass(frozen=True)
class Probe:
    """One thing that is relied on.

    Attributes:
        about: What it is.
        packages: The packages whose versions decide it.
        run: Raises if it does not hold.
    """

    about: str
    packages: frozenset[str]
    run: Callable[[], None]


class ProbeOutcome(NamedTuple):
    """What a probe found.

    Attributes:
        error: What does not hold, on one line; empty if all is well.
    """

    about: str
    packages: tuple[str, ...]
    seconds: float
    error: str


PROBES: list[Probe] = []


def run_probes(packages: Sequence[str] = tuple(TESTED)) -> Iterator[ProbeOutcome]:
    """Runs the probes that the versions of some packages decide, and whose packages are all installed."""
    present = installed().keys()
    for probe in PROBES:
        if probe.packages.isdisjoint(packages) or not probe.packages <= present:
            continue
        start, error = time.perf_counter(), ""
        try:
            with torch.no_grad():
                probe.run()
        except Exception as failure:
            (*_, last) = traceback.extract_tb(failure.__traceback__)
            error = " ".join(f"{type(failure).__name__}: {failure} ({last.name})".split())
        torch.compiler.reset()
        yield ProbeOutcome(probe.about, tuple(sorted(probe.packages)), round(time.perf_counter() - start, 2), error)


def _probe(about: str, *packages: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def declared(run: Callable[[], None]) -> Callable[[], None]:
        PROBES.append(Probe(about, frozenset(packages), run))
        return run

    return declared


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.eps = nn.Linear(8, 16), nn.Linear(16, 4), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) + self.eps)


def _compiled(model: Any, dynamic: bool | None = False, backend: Any = "openvino", **options: Any) -> CompiledModule:
    return compile(model, dynamic=dynamic, backend=backend, options={"min_partition_us": 0, **options})


def _same(compiled: CompiledModule, *inputs: Any) -> None:
    torch.testing.assert_close(compiled(*inputs), compiled.eager(*inputs), rtol=1e-4, atol=1e-5)


def _whole(compiled: CompiledModule) -> None:
    report = compiled.report
    assert report.summary.coverage == 1.0 and not report.fallbacks, report.to_text()


@_probe("names that have no public counterpart", "torch", "openvino")
def _names() -> None:
    for module in pkgutil.iter_modules(upstream.__path__):
        importlib.import_module(f"{upstream.__name__}.{module.name}")


@_probe("a model runs on OpenVINO, and the report counts it", "torch", "openvino")
def _model() -> None:
    compiled = _compiled(_Net().eval())
    _same(compiled, torch.randn(3, 8))
    _whole(compiled)


@_probe("one graph for all sizes, whose numbers stay constants", "torch", "openvino")
def _sizes() -> None:
    compiled = _compiled(_Net().eval(), dynamic=True)
    for rows in (3, 5, 7):
        _same(compiled, torch.randn(rows, 8))
    _whole(compiled)
    assert compiled.report.summary.recompiles == 0, compiled.report.to_text()


@_probe("a layer of gates stays one operator", "torch", "openvino")
def _recurrent() -> None:
    model = nn.LSTM(8, 8, batch_first=True).eval()
    compiled = _compiled(lambda x: model(x)[0])
    _same(compiled, torch.randn(2, 5, 8))
    _whole(compiled)
    (graph,) = compiled.report.tracker.graphs
    assert any("lstm" in name for part in graph.partitions for name in part.op_counts)


@_probe("attention with a mask", "torch", "openvino")
def _attention() -> None:
    compiled = _compiled(torch.nn.functional.scaled_dot_product_attention)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    _same(compiled, *(torch.randn(2, 2, 9, 64) for _ in range(3)), mask[:, None, None])
    _whole(compiled)


@_probe("a graph break is counted with its reason and line", "torch")
def _graph_break() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return torch.sigmoid(x) + 1

    compiled = _compiled(model)
    _same(compiled, torch.randn(3, 8))
    (graph_break,) = compiled.report.tracker.graph_breaks
    assert __file__ in graph_break.where and graph_break.reason, graph_break


@_probe("a recompilation is counted with the guard that failed", "torch")
def _recompile() -> None:
    compiled = _compiled(_Net().eval())
    for rows in (3, 5):
        _same(compiled, torch.randn(rows, 8))
    (recompile,) = compiled.report.tracker.recompiles
    assert "size mismatch" in recompile.reason, recompile


@_probe("an operator that stays in eager PyTorch is counted", "torch", "openvino")
def _fallback() -> None:
    compiled = _compiled(_Net().eval(), disabled_ops=["aten.relu.default"])
    _same(compiled, torch.randn(3, 8))
    assert compiled.report.fallback_counts().get("disabled_op") == 1, compiled.report.to_text()


@_probe("what eager PyTorch refuses is refused", "torch")
def _refused() -> None:
    compiled = _compiled(_Net().eval())
    try:
        compiled(torch.randn(3, 9))
    except RuntimeError:
        return
    raise AssertionError("a product of matrices that do not fit was computed")


@_probe("a changed weight is noticed", "torch")
def _weights() -> None:
    model = _Net().eval()
    compiled, x = _compiled(model), torch.randn(3, 8)
    _same(compiled, x)
    model.second.weight.mul_(2)
    _same(compiled, x)
    model.first.weight.data = torch.randn(16, 8)
    _same(compiled, x)


@_probe("an input that is overwritten", "torch", "openvino")
def _written() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x[0] = 0
        return torch.relu(x) * 2

    compiled, ours, its = _compiled(model), torch.randn(3, 8), torch.randn(3, 8)
    its.copy_(ours)
    torch.testing.assert_close((compiled(ours), ours), (model(its), its))


@_probe("torch.export as the way in", "torch", "openvino")
def _export() -> None:
    compiled = _compiled(_Net().eval(), backend="export")
    _same(compiled, torch.randn(3, 8))
    _whole(compiled)


@_probe("TorchScript's tracer and frontend", "torch", "openvino")
def _torchscript() -> None:
    compiled = _compiled(_Net().eval(), backend="openvino_ts")
    _same(compiled, torch.randn(3, 8))
    _whole(compiled)


@_probe("a compiled model comes back from the cache", "torch", "openvino")
def _cache() -> None:
    model, x = _Net().eval(), torch.randn(3, 8)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            torch.compiler.reset()
            compiled = _compiled(model, model_caching=True, cache_dir=folder).freeze()
            _same(compiled, x)
        record = compiled.report.cache.to_dict()
    assert record["hits"] > 0, record


@_probe("a language model with a cache of keys and values", "transformers", "torch")
def _transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    compiled = _compiled(model)
    ids = torch.randint(0, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    ours, right = (model_(input_ids=ids, attention_mask=mask) for model_ in (compiled, model))
    torch.testing.assert_close(ours.logits, right.logits, rtol=1e-3, atol=1e-4)
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()


@_probe("TorchServe's handlers and contexts", "torchserve")
def _torchserve() -> None:
    from ts.context import Context
    from ts.torch_handler.base_handler import BaseHandler

    steps = ("initialize", "preprocess", "inference", "postprocess", "handle", "_load_pickled_model")
    missing = [name for name in steps if not callable(getattr(BaseHandler, name, None))]
    assert not missing, f"BaseHandler has no {', '.join(missing)}"
    context = Context("net", "/model", {"model": {}}, 2, None, "1.0")
    assert context.system_properties["batch_size"] == 2 and context.manifest == {"model": {}}
