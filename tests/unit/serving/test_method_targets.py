"""Methods that `handler.openvino.compile` names: what else of their modules stays as it is, and what is refused."""

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from encoder import build
from torchserve_openvino.backend.eager_watch import EagerWatch
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.method_compiler import GenerateCompiler
from torchserve_openvino.serving.observation.methods import MethodGraph, Redirected
from torchserve_openvino.serving.observation.parts import part_at

SOURCE = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    def encode(self, x, scale=1.0):
        return self.first(x) * scale
    def decode(self, x):
        return self.last(x)
    @torch.no_grad()
    def quietly(self, x):
        return self.encode(x).relu()
    @staticmethod
    def plain(x):
        return x
    def forward(self, x):
        return self.decode(self.encode(x).relu())
"""
X = torch.linspace(-1, 1, 8).view(2, 4)


class Pipeline:
    def __init__(self) -> None:
        self.model = build(SOURCE, "Network").eval()

    def run(self, x: Any) -> Any:
        return self.model(x)


def watched(run: Any) -> Any:
    return EagerWatch([], lambda eager: None).watch(run)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("pipe.model.forward", "name the module itself, 'pipe.model'"),
        ("pipe.model.eval", "is a method of Network, not a torch.nn.Module or a method of one that computes"),
        ("pipe.run", "is a method of Pipeline, not"),
        ("pipe.model.plain", "is a function, not"),
        ("pipe.model.encod", "Did you mean 'encode'"),
        ("pipe", "is a Pipeline, not"),
    ],
)
def test_what_is_no_method_of_a_module_is_refused(path, said) -> None:
    with pytest.raises(ModelLoadError, match=f"handler.openvino.compile names '{path}'.*{said}"):
        part_at(SimpleNamespace(pipe=Pipeline()), path)


def test_only_calls_of_the_handlers_own_code_are_redirected() -> None:
    pipe = Pipeline()
    before, state = pipe.model.encode(X, scale=2.0), list(pipe.model.state_dict())
    part = part_at(SimpleNamespace(pipe=pipe), "pipe.model.encode")
    assert isinstance(part, MethodGraph) and not part.training and not GenerateCompiler().matches(part)
    redirect = Redirected(part, lambda *args, **kwargs: ("elsewhere", args, kwargs))
    assert watched(lambda: pipe.model.encode(X, scale=3.0)) == ("elsewhere", (X,), {"scale": 3.0})
    assert torch.equal(pipe.model.encode(X, scale=2.0), before) and list(pipe.model.state_dict()) == state
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pipe.model.encode(X, 2.0)))
    watched(lambda: (thread.start(), thread.join()))
    assert torch.equal(found[0], before), "another thread"
    redirect.undo()
    assert torch.equal(watched(lambda: pipe.model.encode(X, scale=2.0)), before)
    again = part_at(SimpleNamespace(pipe=pipe), "pipe.model.encode")
    assert isinstance(again, MethodGraph) and again.calls is part.calls, "named twice"
    assert torch.equal(copy.deepcopy(pipe.model).encode(X, 2.0), before)


def test_a_model_that_calls_the_method_is_compiled_with_its_own_code() -> None:
    pipe = Pipeline()
    wanted = pipe.model(X)
    part = part_at(SimpleNamespace(pipe=pipe), "pipe.model.encode")
    compiled = tov.compile(pipe.model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), wanted)
        Redirected(part, lambda *_: pytest.fail("a call inside of the model"))
        torch.testing.assert_close(watched(lambda: compiled(X)), wanted)
    summary = compiled.report.summary
    assert summary.coverage == 1.0 and summary.graphs == 1 and summary.recompiles == summary.graph_breaks == 0


def test_the_cache_tells_methods_apart_and_does_not_mind_redirects() -> None:
    pipe, other = Pipeline(), Pipeline()
    handler = SimpleNamespace(pipe=pipe)
    whole = fingerprint(pipe.model)
    parts = [part_at(handler, f"pipe.model.{name}") for name in ("encode", "decode", "quietly")]
    found = [fingerprint(part) for part in parts]
    assert len({each.code for each in found}) == 3 and not any(each.unknown for each in found)
    for part in parts:
        Redirected(part, nn.Identity())
    assert [fingerprint(part) for part in parts] == found
    assert fingerprint(pipe.model) == whole == fingerprint(other.model)


def test_a_method_without_gradients_is_compiled() -> None:
    part = part_at(SimpleNamespace(pipe=Pipeline()), "pipe.model.quietly")
    compiled = tov.compile(part)
    torch.testing.assert_close(compiled(X), part(X))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.summary.fallbacks
