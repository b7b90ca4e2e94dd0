"""Batch sizes: which are compiled, how batches are split and padded, and that answers do not change."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.serving.modes import Modes
from torchserve_openvino.serving.requests import batching
from torchserve_openvino.serving.requests.batching import CallCosts, RowRunner, bucket_sizes, split_rows
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls
from torchserve_openvino.serving.served import ServedModel
from torchserve_openvino.serving.shapes.probe import RowFacts


@pytest.mark.parametrize(
    ("buckets", "batch_size", "streams", "sizes"),
    [
        ("auto", 1, 1, [1]), ("auto", 8, 1, [1, 2, 4, 8]), ("auto", 6, 1, [1, 2, 4, 6]), ([2], 4, 1, [2, 4]),
        ([4, 1], 4, 1, [1, 4]), ("auto", 8, 2, [1, 2, 4]), ("auto", 5, 2, [1, 2, 3]), ([16], 4, 2, [16]),
    ],
)  # fmt: skip
def test_bucket_sizes(buckets, batch_size, streams, sizes) -> None:
    assert bucket_sizes(buckets, batch_size, streams) == sizes


@given(rows=st.integers(1, 40), largest=st.integers(1, 9), streams=st.integers(1, 4))
def test_parts_hold_all_rows_and_fit(rows: int, largest: int, streams: int) -> None:
    parts = split_rows(rows, bucket_sizes("auto", largest), streams)
    assert sum(parts) == rows and max(parts) <= largest and min(parts) >= 1
    assert len(parts) >= min(streams, rows)


@given(rows=st.integers(1, 20), largest=st.integers(1, 8), streams=st.integers(1, 3))
def test_padding_and_splitting_never_change_an_answer(rows: int, largest: int, streams: int) -> None:
    seen = []

    def model(x, *, scale):
        seen.append(x.shape[0])
        return {"y": x * scale, "n": 3}

    sizes = bucket_sizes("auto", largest)
    x, scale = torch.randn(rows, 2), torch.randn(rows, 1)
    answer = RowRunner(model, sizes, ParallelCalls(streams), Counters())((x,), {"scale": scale}, rows)
    assert torch.equal(answer["y"], x * scale) and answer["n"] == 3
    assert set(seen) <= set(sizes)


def test_padded_and_split_rows_are_counted() -> None:
    counters = Counters()
    run = RowRunner(lambda x: x, [1, 4], ParallelCalls(), counters)
    for rows in (1, 3, 4, 9):
        assert run((torch.zeros(rows, 1),), {}, rows).shape[0] == rows
    assert counters.to_dict() == {"padded_rows": 1 + 3, "split_batches": 1}


def noted(times: dict[int, float], shape: str = "") -> CallCosts:
    costs = CallCosts(list(times))
    for size, seconds in times.items():
        for factor in (9.0, 1.0, 1.0, 1.1, 1.0):
            costs.note(shape, size, factor * seconds)
    return costs


def test_a_batch_is_split_where_rows_cost_and_padded_where_calls_do() -> None:
    large, small = noted({1: 1.1, 2: 2.0, 4: 3.8, 8: 7.2}), noted({1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2})
    assert [sorted(large.parts("", rows)) for rows in (3, 5, 6, 7, 8)] == [[1, 2], [1, 4], [2, 4], [7], [8]]
    assert [small.parts("", rows) for rows in (3, 5, 6, 7)] == [[3], [5], [6], [7]]
    # Four rows leave the processor's cache.
    assert noted({1: 1.3, 2: 1.9, 4: 5.1}).parts("", 4) == [2, 2]
    # Other shapes and too few calls decide nothing.
    assert large.parts("other", 3) == [3]
    few = CallCosts([1, 2, 4])
    few.note("", 4, 10.0)
    assert few.parts("", 3) == [3]


def test_sizes_of_which_nothing_is_known_are_tried_and_times_that_change_are_renewed() -> None:
    costs, seconds = CallCosts([1, 2, 4]), {1: 1.0, 2: 1.5, 4: 4.0}
    seen = []
    for _ in range(1000):
        for rows in costs.parts("", 4) if seen else [4]:
            seen.append(rows)
            costs.note("", rows, seconds[rows])
        if len(seen) > 400:
            seconds[4] = 2.0
    assert seen[:300].count(2) > 100 and seen[:300].count(4) > 20 and set(seen[-100:]) == {4}


@given(
    rows=st.integers(1, 16),
    times=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(1e-4, 1.0), min_size=1),
)
def test_calls_chosen_by_cost_hold_all_rows(rows: int, times: dict[int, float]) -> None:
    costs = noted({size: times[size] for size in sorted(times)} | {16: 1.0})
    parts = costs.parts("", rows)
    assert sum(parts) == rows and min(parts) >= 1


def timed_rows(answer, monkeypatch):
    """Returns a runner of a model that is slower with more rows, warmed in all sizes, and the sizes of its calls."""
    seen, now = [], [0.0]
    monkeypatch.setattr(batching, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def model(x):
        seen.append(x.shape[0])
        now[0] += 0.001 * x.shape[0] ** 2
        return answer(x)

    run = RowRunner(model, [1, 2, 4], ParallelCalls(), Counters())
    for rows in (1, 2) * 6:
        run((torch.randn(rows, 2),), {}, rows)
    for _ in range(12):
        for rows in (3, 4):
            x = torch.randn(rows, 2)
            assert torch.equal(run((x,), {}, rows), answer(torch.cat([x, x[-1:]]))[:3] if rows == 3 else answer(x))
    seen.clear()
    return run, seen


def test_calls_are_timed_and_split(monkeypatch) -> None:
    run, seen = timed_rows(lambda x: x * 2, monkeypatch)
    x = torch.randn(4, 2)
    assert torch.equal(run((x[:3],), {}, 3), x[:3] * 2) and max(seen) <= 2
    assert torch.equal(run((x,), {}, 4), x * 2) and max(seen) <= 2


def test_a_model_that_asks_for_the_batch_size_is_not_split(monkeypatch) -> None:
    run, seen = timed_rows(lambda x: x * x.shape[0], monkeypatch)
    x = torch.randn(4, 2)
    assert torch.equal(run((x,), {}, 4), x * 4) and seen == [4]


def test_streams_run_at_the_same_time_and_keep_the_callers_modes() -> None:
    together = threading.Barrier(3, timeout=10)

    def call(n):
        together.wait()
        return n, Modes.now()

    modes = Modes(grad=False, autocast=torch.bfloat16)
    with modes.on():
        assert ParallelCalls(3).run([lambda n=n: call(n) for n in range(3)]) == [(n, modes) for n in range(3)]


def test_a_failing_stream_fails_the_batch_after_all_have_ended() -> None:
    ended = []

    def bad():
        raise ValueError("bad part")

    with pytest.raises(ValueError, match="bad part"):
        ParallelCalls(2).run([bad, lambda: ended.append(1)])
    assert ended == [1]


def batch_of(model, **options):
    return ServedModel(model, model, sizes=[4], **options)


def test_a_model_that_reduces_over_the_batch_is_not_padded() -> None:
    model = batch_of(lambda x: x.sum())
    x = torch.randn(3, 2)
    assert torch.equal(model(x), x.sum()) and not model.joins
    assert "first dimension" in model.facts.reason


def test_a_model_whose_rows_depend_on_each_other_is_not_padded() -> None:
    model = batch_of(lambda x: x - x.mean(0, keepdim=True))
    x = torch.randn(3, 2)
    assert torch.equal(model(x), x - x.mean(0, keepdim=True)) and "depends on the other" in model.facts.reason


def test_batch_norm_in_training_mode_is_not_padded_nor_run_to_find_out() -> None:
    module = torch.nn.BatchNorm1d(2).train()
    model = batch_of(module)
    model(torch.randn(3, 2))
    assert not model.joins and "training" in model.facts.reason and int(module.num_batches_tracked) == 1


def test_inputs_of_different_first_dimensions_are_not_padded() -> None:
    model = batch_of(lambda x, table: x @ table)
    x, table = torch.randn(3, 2), torch.randn(2, 5)
    assert torch.equal(model(x, table), x @ table)


def test_a_known_model_is_padded() -> None:
    model = batch_of(lambda x: x * 2, facts=RowFacts(True))
    x = torch.randn(3, 2)
    assert torch.equal(model(x), x * 2) and model.counters.to_dict() == {"padded_rows": 1}


def test_padding_in_inference_mode_does_not_compile_anew() -> None:
    """Dynamo guards on whether a tensor was made in inference mode, in which handlers call their model."""
    import torchserve_openvino as tov

    eager = torch.nn.Linear(2, 3).eval()
    compiled = tov.compile(eager)
    model = ServedModel(compiled, eager, sizes=[4], facts=RowFacts(True))
    for rows in (4, 3, 4, 2, 9):
        x = torch.randn(rows, 2)
        with torch.inference_mode():
            torch.testing.assert_close(model(x), eager(x))
            torch.testing.assert_close(model(x * 2), eager(x * 2))
    assert compiled.report.summary.graphs == 1 and not compiled.report.to_dict()["recompiles"]
