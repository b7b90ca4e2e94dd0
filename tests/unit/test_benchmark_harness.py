"""What the benchmarks share: interleaved timing, its statistics, tables and options."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import call, harness, layers, output, shadow
from benchmarks.harness import Times, enough_repeats, interleave, percentile


def test_contenders_run_in_turns_in_changing_order() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleave(calls, turns=20, warmup=5)
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(turns) == 25
    assert len(set(turns)) > 3
    assert {name: len(values) for name, values in times.milliseconds.items()} == {"a": 20, "b": 20, "c": 20}


def test_a_short_call_is_repeated() -> None:
    seen: Counter[str] = Counter()
    calls = {"short": lambda: seen.update("s"), "long": lambda: sum(range(2_000_000))}
    repeats = enough_repeats(calls)
    assert repeats["short"] > 100 and repeats["long"] <= 3
    seen.clear()
    interleave({"short": calls["short"]}, turns=2, repeats={"short": 7})
    assert seen["s"] == 14


def test_what_comes_before_a_measurement_is_not_measured(monkeypatch) -> None:
    order: list[str] = []
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def take(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    calls = {name: lambda name=name: take(name, 0.25) for name in "ab"}
    before = {name: lambda name=name: take(f"before {name}", 100) for name in "ab"}
    times = interleave(calls, turns=3, warmup=1, repeats={"b": 2}, before=before)
    text = " ".join(order)
    assert text.count("before a a") == 4 and text.count("before b b b") == 4 and len(order) == 20
    assert times.milliseconds == {"a": [250.0] * 3, "b": [250.0] * 3}


def test_statistics_are_those_of_pairs() -> None:
    times = Times({"a": [1.0, 2.0, 30.0], "b": [2.0, 2.0, 10.0], "none": []})
    assert times.median("a") == 2.0
    assert times.ratio("a", "b") == 1.0
    assert times.above("a", "b") == 0.0
    assert times.ratio("a", "none") is None and times.above("a", "missing") is None
    low, high = Times({"a": [float(i) for i in range(1, 100)]}).deciles("a")
    assert (low, high) == (10.0, 90.0)


def test_names_come_in_the_known_order_and_unknown_ones_are_refused() -> None:
    assert output.chosen("c, a", ["a", "b", "c"], "--only") == ["a", "c"]
    with pytest.raises(typer.BadParameter, match="unknown: d; choose from a, b, c"):
        output.chosen("a,d", ["a", "b", "c"], "--only")


def test_a_percentile_is_the_value_of_the_nearest_rank() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 2, 3, 4, 4]


def test_a_nan_anywhere_is_the_difference() -> None:
    zero, nan = torch.zeros(2), torch.tensor([0.0, math.nan])
    assert call.worst_difference((zero, zero + 1), [zero, zero]) == 1.0
    assert math.isnan(call.worst_difference((zero, nan), [zero, zero]))
    with pytest.raises(ValueError):
        call.worst_difference((zero,), [zero, zero])


def test_an_unknown_layer_or_model_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="unknown: nothing; choose from lstm, lstm-batch8"):
        layers.main(only="lstm,nothing")
    with pytest.raises(typer.BadParameter, match="unknown: nothing; choose from efficientnet-lite0"):
        shadow.main(model="nothing")


def test_a_table_fills_short_rows(capsys: pytest.CaptureFixture[str]) -> None:
    output.results(60).print(output.table("title", ("name", "ms"), [("first", output.number(1.234)), ("second",)]))
    shown = capsys.readouterr().out
    assert "title" in shown and "1.23" in shown and "second" in shown
    assert output.number(None) == ""


def test_figures_are_written_with_their_environment(tmp_path: Path) -> None:
    output.write_json(None, {"a": 1})
    output.write_json(tmp_path / "out.json", {"a": 1})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["a"] == 1 and "torch" in json.dumps(written["environment"])
