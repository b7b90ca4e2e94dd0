"""The script that runs published architectures: its cases cover what they say, and a wrong answer is noticed."""

import itertools
import math
from typing import Any

import pytest
import torch

import torchserve_openvino as tov
from model_zoo import grid, results, running, shrinking
from model_zoo.catalog import Architecture
from model_zoo.compare import difference
from model_zoo.grid import Case
from model_zoo.outcome import Outcome

BERT = Architecture("transformers", "bert", "BertForMaskedLM")


@pytest.mark.parametrize("heads", [grid.HEADS, (128, 64)])
def test_the_cases_contain_each_pair_of_values(heads: tuple[int, ...]) -> None:
    chosen = [case.to_dict() for case in grid.cases(heads)]
    axes = {**grid.AXES, "head": heads}
    for (one, values), (other, others) in itertools.combinations(axes.items(), 2):
        pairs = {(case[one], case[other]) for case in chosen}
        assert pairs == set(itertools.product(values, others)), (one, other)


def test_the_first_cases_contain_each_value() -> None:
    chosen = grid.cases()
    first = [case.to_dict() for case in chosen[: grid.values_covered(chosen)]]
    assert len(first) == len(grid.HEADS)
    for axis, values in grid.AXES.items():
        assert {case[axis] for case in first} == set(values)


def test_a_case_that_differs_only_in_what_a_model_does_not_have_is_left_out() -> None:
    chosen = [Case(head=64), Case(head=128), Case(head=64, padding="right"), Case(head=64, precision="bf16")]
    assert grid.distinct(chosen, grid.COMMON) == [chosen[0], chosen[3]]
    assert grid.distinct(chosen, grid.COMMON | {"head", "padding"}) == chosen


def test_a_small_model_keeps_a_layer_of_each_kind() -> None:
    from transformers import Gemma3TextConfig

    config = shrinking.small(Gemma3TextConfig(), Case(head=96))
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (2, 2, 96)
    assert config.num_key_value_heads == 1
    assert config.vocab_size == shrinking.VOCABULARY


def test_a_part_keeps_what_its_model_sets() -> None:
    from transformers import DepthAnythingConfig

    published = DepthAnythingConfig()
    assert not published.backbone_config.reshape_hidden_states
    small = shrinking.small(published, Case(head=64)).backbone_config
    assert not small.reshape_hidden_states
    assert len(small.out_features) == len(published.backbone_config.out_features)


@pytest.mark.parametrize(
    "ours",
    [
        {"logits": torch.tensor([1.0, math.nan])},
        {"logits": torch.tensor([1.0, 2.5])},
        {"logits": torch.tensor([[1.0, 2.0]])},
        {"logits": torch.tensor([1.0, 2.0]).double()},
        {"scores": torch.tensor([1.0, 2.0])},
        {},
    ],
)
def test_a_difference_is_seen(ours: Any) -> None:
    expected = {"logits": torch.tensor([1.0, 2.0])}
    assert difference(expected, expected).largest == 0.0
    assert difference(ours, expected).largest >= 0.25


def test_a_cache_is_compared_too() -> None:
    from transformers import DynamicCache

    caches = DynamicCache(), DynamicCache()
    for cache, value in zip(caches, (1.0, 2.0), strict=True):
        cache.update(torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), value), 0)
    assert difference(caches[0], caches[0]).largest == 0.0
    assert difference(caches[0], caches[1]).largest == 0.5


class _OffByOne:
    """Answers that are wrong at one position, in place of a compiled model's."""

    report = tov.compile(torch.nn.ReLU()).report

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.model(*args, **kwargs)
        answer.logits[1, -1, 0] += 0.05 * answer.logits.abs().max()
        return answer


def test_a_wrong_answer_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(head=64, length=33)
    assert running.run(BERT, [case], 0, {}).verdict == "right"
    monkeypatch.setattr(tov, "compile", lambda model, **options: _OffByOne(model))
    outcome = running.run(BERT, [case], 0, {})
    assert outcome.verdict == "WRONG"
    assert "logits: at [1, 32, 0]" in outcome.detail
    assert 0.03 < outcome.difference < 0.08


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_router_may_choose_between_experts_that_are_alike(precision: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False))
    model[0].weight.data[1] = model[0].weight.data[0]

    def draw(number: int, changed: bool) -> Any:
        return {"x": torch.ones(2, 8)}

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.scores(x)
            return torch.where(scores[:, :1] > scores[:, 1:], x, -x)

    subject = running.Subject(Router(), draw, "other", frozenset({"x"}))
    with torch.no_grad():
        expected = running._calls(subject, subject.model, Case())
        flipped = [{name: -value for name, value in each.items()} for each in expected]
        found = difference(flipped, expected)
        assert running._limit(subject, Case(precision=precision), expected, found) >= found.largest == 2.0


def test_a_model_that_is_too_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_zoo.building._MOST_PARAMETERS", 1000)
    outcome = running.run(BERT, [Case()], 0, {})
    assert (outcome.verdict, outcome.detail.split(":")[0]) == ("not built", "too large")


GELU = {"aten.gelu.default: no | rule": 2}
RAN = [
    (BERT, Case(), Outcome("right", kind="text", ops=10, coverage=0.9, graphs=1, partitions=2, fallbacks=GELU)),
    (BERT, Case(head=64), Outcome("CRASH", "the process ended with status -8")),
    (Architecture("timm", "resnet18"), Case(), Outcome("not built", "too large: 900 million parameters")),
]


def _results() -> results.Results:
    made = results.Results()
    for each in RAN:
        made.add(*each)
    return made


def test_an_architecture_has_its_worst_verdict() -> None:
    made = _results()
    assert dict(made.counts()) == {"CRASH": 1, "not built": 1}
    assert made.failures == [RAN[1]]


def test_a_log_is_read_as_it_was_written(tmp_path: Any) -> None:
    log = results.Log(tmp_path / "log.jsonl")
    assert list(log.read()) == []
    for each in RAN:
        log.append(*each)
    assert list(log.read()) == RAN


def test_the_table_replaces_the_one_of_the_page(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "conformance.md"
    page.write_text(f"before\n\n{results.BEGIN}\nold\n{results.END}\n\nafter\n")
    monkeypatch.setattr(results, "PAGE", page)
    results.write(_results())
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| bert | text | 2 | CRASH | 0.900 | 2.0 | aten.gelu.default: no \\| rule |" in text
    results.write(_results())
    assert page.read_text() == text
