"""Cached results are correct for outputs of any structure, stateful models, dynamic shapes, and glue."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_models import Glued, Net, X, ask, assert_hit, assert_traced, both, cache_of, differs, entries, fresh
from torch import nn

from encoder import encoder
from helpers import assert_same

# --- output structures ------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Answer:
    a: torch.Tensor
    b: torch.Tensor


STORED: dict[str, Callable[..., Any]] = {
    "tensor": lambda x: torch.relu(x) * 2,
    "tuple": lambda x: (torch.relu(x), x - 1),
    "list of one": lambda x: [torch.relu(x) * 2],
    "dict": lambda x: {"b": torch.relu(x), "a": x - 1},
    "dict of ints": lambda x: {7: torch.relu(x), 1: x - 1},
    "ordered dict": lambda x: OrderedDict(b=torch.relu(x), a=x - 1),
    "nested": lambda x: {"a": [torch.relu(x), (x - 1, {"c": x * 3})], "b": ()},
    "an int": lambda x: (torch.relu(x), 5, x.shape[0], None, "text", 1.5, True),
    "twice the same": lambda x: (torch.relu(x),) * 2,
    "minus infinity": lambda x: torch.relu(x).masked_fill(x > 0, float("-inf")),
    "an infinite float": lambda x: (torch.relu(x), float("inf")),
    "types": lambda x: (torch.relu(x).to(torch.bfloat16), (x > 0), x.argmax(), x.half() * 2),
    "constant tensor": lambda x: torch.relu(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "made anew": lambda x: torch.relu(x) + torch.arange(6) * torch.full((6,), 0.5),
    "strides": lambda x: (torch.relu(x).t() * 2, (x * 3).t().contiguous()),
    "complex glue": lambda x: (torch.view_as_complex(torch.relu(x).reshape(2, 3, 2)) * torch.tensor([1 + 1j])).abs(),
    "kwargs of an op": lambda x: torch.relu(x).sum(dim=1, keepdim=True, dtype=torch.float64),
    "slices": lambda x: torch.relu(x)[:, 1:5:2] * 2,
    "several outputs of an op": lambda x: tuple(torch.topk(x * 2, 2)),
}


@pytest.mark.parametrize("model", STORED.values(), ids=STORED)
def test_structures_that_are_stored(tmp_path: Path, model: Callable[..., Any]) -> None:
    both(lambda: model, tmp_path / "c", X)


def moved(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1) * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(x)
    torch._dynamo.graph_break()
    return x + 1


RIGHT: dict[str, Callable[..., Any]] = {
    "a view": lambda x: x.t(),
    "a view of a result": lambda x: torch.relu(x).t(),
    "the input": lambda x: (x, torch.relu(x)),
    "only the input": lambda x: x,
    "a constant": lambda x: (torch.relu(x), torch.ones(3)),
    "namedtuple": lambda x: Pair(torch.relu(x), x - 1),
    "dataclass": lambda x: Answer(torch.relu(x), x - 1),
    "dict by tuples": lambda x: {(1, 2): torch.relu(x), "b": x - 1},
    "dict by types": lambda x: {torch.float32: torch.relu(x)},
    "defaultdict": lambda x: defaultdict(list, a=torch.relu(x)),
    "nothing": lambda x: None,
    "an input that is written to": moved,
    "a graph break": broken,
    "a branch": lambda x: x + 1 if x.sum() > 0 else x - 1,
    "sizes of data": lambda x: torch.relu(x[x > 0]),
    "an item": lambda x: (torch.relu(x), int(x.argmax())),
}


@pytest.mark.parametrize("model", RIGHT.values(), ids=RIGHT)
def test_structures_that_need_only_be_right(tmp_path: Path, model: Callable[..., Any]) -> None:
    for _ in range(2):
        compiled = fresh(model, tmp_path / "c")
        for factor in (1, 1, -1):
            if model is RIGHT["dataclass"]:
                with torch.no_grad():
                    got, expected = compiled(X * factor), model(X * factor)
                assert_same([got.a, got.b], [expected.a, expected.b])
            else:
                ask(compiled, X * factor)
        assert cache_of(compiled)["verified"]["rejected"] == 0


INPUTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "namedtuple": (lambda p: torch.relu(p.a) - p.b, Pair(X, X * 2)),
    "dict": (lambda p: torch.relu(p["a"]) - p["b"], {"b": X, "a": X * 2}),
    "dict by ints": (lambda p: torch.relu(p[1]) - p[2], {2: X, 1: X * 2}),
    "dict by tuples": (lambda p: torch.relu(p[1, 2]) - p[3], {(1, 2): X, 3: X * 2}),
    "dict by types": (lambda p: torch.relu(p[torch.int8]), {torch.int8: X}),
    "defaultdict": (lambda p: torch.relu(p["a"]), defaultdict(list, a=X)),
    "list": (lambda p: torch.relu(p[0]) - p[1], [X, X * 2]),
    "text": (lambda p: torch.relu(p[0]) if p[1] == "__enum__" else p[0], (X, "__enum__")),
    "nan": (lambda p: torch.relu(p) * float("nan"), X),
    "infinity": (lambda p: torch.relu(p[0]).clamp(max=p[1]) + 1, (X, float("inf"))),
    "an object": (lambda p: torch.relu(p[0]) * p[1].a, (X, Answer(2.0, 3.0))),
    "a type": (lambda p: torch.relu(p[0]).to(p[1]), (X, torch.float64)),
    "empty": (lambda p: torch.relu(p[0]) + p[1].sum(), (X, torch.empty(0))),
    "a size": (lambda p: torch.relu(p[0]).reshape(p[1]), (X, torch.Size([3, 4]))),
}


@pytest.mark.parametrize("case", INPUTS.values(), ids=INPUTS)
def test_inputs_of_every_structure(tmp_path: Path, case: tuple[Callable[..., Any], Any]) -> None:
    model, given = case
    for _ in range(2):
        compiled = fresh(model, tmp_path / "c")
        for _ in range(2):
            ask(compiled, given)


def test_an_output_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    ids = torch.randint(0, 20, (2, 5))
    for _ in range(2):
        torch.manual_seed(0)
        compiled = fresh(transformers.BertModel(config).eval(), tmp_path / "c")
        ask(compiled, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert_hit(compiled)


def test_an_encoder_with_a_mask(tmp_path: Path) -> None:
    ids, mask = torch.randint(0, 50, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    for _ in range(2):
        compiled = fresh(encoder(), tmp_path / "c")
        ask(compiled, ids, mask)
        ask(compiled, ids)
    assert_hit(compiled, 2)


# --- stateful and random models ---------------------------------------------------------------------------------


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return torch.relu(x) + self.steps


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.last + x
        return self.last * 2


@pytest.mark.parametrize("kind", [Steps, Counting, Remembering, lambda: nn.BatchNorm1d(6).train()])
def test_models_with_state(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    for _ in range(2):
        model, twin = kind(), kind()
        compiled = fresh(model, tmp_path / "c")
        with torch.no_grad():
            for factor in (1, 2, 3, 4):
                assert_same(compiled(X * factor), twin(X * factor))
        assert_same(list(model.buffers()), list(twin.buffers()))


def test_random_numbers_are_drawn_anew_and_are_no_wrong_answer(tmp_path: Path) -> None:
    model = lambda x: torch.relu(x) + torch.rand_like(x)
    for _ in range(2):
        compiled = fresh(model, tmp_path / "c")
        with torch.no_grad():
            compiled(X)
            torch.manual_seed(3)
            got = compiled(X)
            torch.manual_seed(3)
            assert_same(got, model(X))
            assert not torch.equal(compiled(X), compiled(X))
        assert cache_of(compiled)["verified"]["rejected"] == 0


# --- dynamic shapes ---------------------------------------------------------------------------------------------


def test_dynamic_shapes(tmp_path: Path) -> None:
    for process in range(2):
        compiled = fresh(Net().eval(), tmp_path / "c", dynamic=True)
        for batch in (2, 3, 5, 2):
            ask(compiled, torch.randn(batch, 6))
        if process == 0:
            assert cache_of(compiled)["compiles"] == 1
    assert_hit(compiled, 3)
    ask(compiled, torch.randn(9, 6))
    assert cache_of(compiled)["compiles"] == 0
    static = fresh(Net().eval(), tmp_path / "c", dynamic=False)
    ask(static, torch.randn(2, 6))
    assert_traced(static)


def test_dynamic_shapes_through_the_glue(tmp_path: Path) -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.digamma(torch.relu(x) + 2)
            return torch.cat([y, x]).reshape(-1) * x.shape[0] + torch.arange(x.shape[0] * 12)

    for _ in range(2):
        compiled = fresh(Sizes(), tmp_path / "c", dynamic=True)
        for batch in (2, 3, 2, 4):
            ask(compiled, torch.randn(batch, 6))


# --- glue -------------------------------------------------------------------------------------------------------


def test_partitions_with_eager_between(tmp_path: Path) -> None:
    cold = fresh(Glued().eval(), tmp_path / "c")
    ask(cold, X)
    warm = fresh(Glued().eval(), tmp_path / "c")
    for factor in (1, 2, 3):
        ask(warm, X * factor)
    assert_hit(warm)
    assert cache_of(warm)["imports"] == 2
    differs(Glued(1).eval(), Glued(2).eval(), tmp_path / "d", X)


def test_unfrozen_models_share_partitions_only(tmp_path: Path) -> None:
    for process in range(2):
        compiled = fresh(Glued().eval(), tmp_path / "c", frozen=False)
        ask(compiled, X)
        cache = cache_of(compiled)
        assert cache["traces"] == 1 and cache["compiles"] == (0 if process else 2)
        assert cache["imports"] == (2 if process else 0)
    assert not entries(tmp_path / "c", "call")
