"""What eager PyTorch computes faster than OpenVINO steps aside before READY: fallbacks of the kind `slower`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from serving_worker import WARMUP, save_weights

from torchserve_openvino.backend.routes.frozen import Route
from torchserve_openvino.backend.runners.freezing import FreezingRunner
from torchserve_openvino.serving import precision, slower
from torchserve_openvino.serving.placement import Placement
from torchserve_openvino.serving.slower import BUSY, Contention
from torchserve_openvino.serving.verification.measures import CaseTimes
from torchserve_openvino.tasks.tensor import TensorHandler

# What FNet does in place of attention, at the size of its base model: eager's library is tens of times faster.
MIXING = """
import torch
from torch import nn

class Network(nn.Module):
    def forward(self, x):
        return torch.fft.fft2(x, dim=(-2, -1)).real.transpose(1, 2)
"""
MIXED = {"inputs": [{"shape": [256, 768], "dtype": "float32"}]}
TABLE = """
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(100_000, 64)

    def forward(self, x):
        return self.bags(x)
"""
BAGS = {"inputs": [{"shape": [20], "dtype": "int64", "low": 0, "high": 100_000}]}

_TRY_CASE = slower._Decision._try_case


def started(archive: Any, openvino: dict[str, Any], pt2: dict[str, Any] | None = None, **how: Any) -> TensorHandler:
    made = archive({"handler": {"openvino": openvino}, **({"pt2": pt2} if pt2 else {})}, **how)
    handler = TensorHandler()
    handler.initialize(made.context)
    return handler


def slower_ones(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in report["fallbacks"] if each["kind"] == "slower"]


@pytest.fixture
def pairs(monkeypatch) -> list[float]:
    """Ratios of OpenVINO's time to eager's that are measured; no case is fast enough, no loss too small."""
    ratios = [1.5] * 20

    def timed(first, second, seconds, enough=0.0) -> list[tuple[float, float]]:
        first(), second()
        return [(each * 1e-3, 1e-3) for each in ratios]

    monkeypatch.setattr(slower, "paired_seconds", timed)
    monkeypatch.setattr(slower.Contention, "share", lambda contention: 0.0)
    monkeypatch.setattr(slower, "is_fast_enough", lambda times: False)
    monkeypatch.setattr(slower, "MIN_SECONDS", -1.0)
    # Only partitions step aside, also where the eager model does the same.
    monkeypatch.setattr(slower._Decision, "_try_case", lambda *case: False)
    monkeypatch.setattr(slower._Uses, "is_alone", property(lambda uses: False, lambda uses, value: None))
    return ratios


@pytest.fixture
def whole_calls(pairs, monkeypatch) -> None:
    """Only calls as a whole step aside."""
    monkeypatch.setattr(slower._Decision, "_try_case", _TRY_CASE)
    monkeypatch.setattr(slower._Decision, "_try_partition", lambda *partition: None)


@pytest.mark.parametrize(
    ("source", "warmup", "rows"), [(MIXING, MIXED, 1), (TABLE, BAGS, 4096)], ids=["mixing", "table"]
)
def test_a_slow_kernel_of_openvino_is_left_to_eager_and_the_report_has_both_times(
    archive, source, warmup, rows, monkeypatch
) -> None:
    # With one thread, other tests slow both down alike.
    monkeypatch.setattr(slower, "BUSY", float("inf"))
    section = {"warmup": warmup, "threads": 1, "batching": {"buckets": [rows]}}
    handler = started(archive, section, model_file=source, batch_size=rows)
    report = handler.describe_handle()
    (fallback,) = slower_ones(report)
    assert fallback["op"] == "the model" and fallback["to"] == "eager" and fallback["count"] == 1
    assert "OpenVINO took" in fallback["reason"] and "eager PyTorch" in fallback["reason"]
    assert report["summary"]["coverage"] == 0.0 and report["summary"]["partitions"] == 0
    assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0
    shape = (rows, *warmup["inputs"][0]["shape"])
    x = torch.randint(0, 1000, shape) if source is TABLE else torch.randn(shape)
    got, expected = handler.model(x), handler.eager_model(x)
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    # Each call runs in eager, but it is one fallback, decided once.
    assert slower_ones(handler.describe_handle()) == [fallback]


def test_what_other_processes_disturbed_decides_nothing_and_is_not_stored(
    archive, pairs, tmp_path, monkeypatch
) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    how = {"weights": save_weights, "pt2": {"compile": {"backend": "openvino", "options": options}}}
    monkeypatch.setattr(slower.Contention, "share", lambda contention: 1.5)
    report = started(archive, {"warmup": WARMUP}, **how).describe_handle()
    assert not slower_ones(report) and report["summary"]["coverage"] == 1.0
    assert any("other processes disturbed the measurement" in note for note in report["notes"]), report["notes"]
    monkeypatch.setattr(slower.Contention, "share", lambda contention: 0.0)
    assert slower_ones(started(archive, {"warmup": WARMUP}, **how).describe_handle())


def test_threads_wait_for_cores_that_others_use() -> None:
    cores = sorted(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, cores[:1])
        os.sched_setaffinity(0, cores[:1])
        contention, end = Contention(), time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass
        assert contention.share() > BUSY
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()


def test_a_partition_that_is_not_slower_for_sure_stays(archive, pairs) -> None:
    pairs[:] = [1.5] * 10 + [1.0] * 10
    report = started(archive, {"warmup": WARMUP}, weights=save_weights).describe_handle()
    assert not slower_ones(report) and report["summary"]["coverage"] == 1.0


def test_a_small_model_stays_although_a_call_of_openvino_costs_more(archive) -> None:
    report = started(archive, {"warmup": WARMUP}, weights=save_weights).describe_handle()
    assert not slower_ones(report) and report["summary"]["coverage"] == 1.0


@pytest.mark.parametrize(
    ("eager", "compiled", "enough"),
    [(10e-3, 9e-3, True), (10e-3, 11e-3, False), (1e-5, 4e-4, True), (1e-5, 6e-4, False)],
)
def test_times_of_the_verification_screen_the_cases(eager, compiled, enough) -> None:
    assert slower.is_fast_enough(CaseTimes(eager, compiled, compiled)) == enough
    assert not slower.is_fast_enough(None)


def test_a_partition_that_is_slow_only_beside_busy_neighbors_stays(archive, pairs) -> None:
    # One quiet moment shows how fast it is.
    pairs[:] = [3.0] * 19 + [1.0]
    report = started(archive, {"warmup": WARMUP}, weights=save_weights).describe_handle()
    assert not slower_ones(report)


def test_a_case_that_is_fast_enough_is_not_timed(archive, pairs, monkeypatch) -> None:
    monkeypatch.setattr(slower, "is_fast_enough", lambda times: times.eager > 0 and times.compiled > 0)
    monkeypatch.setattr(slower, "paired_seconds", lambda *calls: pytest.fail("timed"))
    report = started(archive, {"warmup": WARMUP}, weights=save_weights).describe_handle()
    assert not slower_ones(report)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"fallback": {"allow": [], "on_violation": "refuse"}}, "fallback.allow has no slower"),
        ({"fallback": {"allow": ["unsupported_op"]}}, "fallback.allow has no slower"),
        ({"fallback": {"min_coverage": 1.0, "on_violation": "refuse"}}, "fallback.min_coverage is 1"),
        ({"release_weights": True}, "release_weights"),
    ],
)
def test_a_policy_that_forbids_it_keeps_the_partition_and_the_report_says_so(archive, pairs, section, reason) -> None:
    handler = started(archive, {"warmup": WARMUP, **section}, weights=save_weights)
    report = handler.describe_handle()
    assert not slower_ones(report) and report["summary"]["coverage"] == 1.0
    (note,) = [note for note in report["notes"] if "stays on OpenVINO, although it is slower there" in note]
    assert reason in note and "OpenVINO took" in note


@pytest.mark.parametrize("allow", ["all", ["slower"]])
def test_it_is_a_kind_of_fallback_that_a_policy_can_allow(archive, pairs, allow) -> None:
    policy = {"allow": allow, "on_violation": "refuse"}
    report = started(archive, {"warmup": WARMUP, "fallback": policy}, weights=save_weights).describe_handle()
    assert len(slower_ones(report)) == 1


def test_without_time_partitions_stay_and_the_report_says_so(archive, pairs, monkeypatch) -> None:
    monkeypatch.setattr(slower, "BUDGET_SECONDS", 0.0)
    report = started(archive, {"warmup": WARMUP}, weights=save_weights).describe_handle()
    assert not slower_ones(report) and any("and not timed against eager" in note for note in report["notes"])


@pytest.fixture
def fast_batch_of_4(pairs, monkeypatch) -> None:
    """A batch of 4 is fast enough on OpenVINO, and nothing else."""
    fast: list[Any] = []
    fall_back_to_eager = slower.fall_back_to_eager

    def recorded(prepared, section, times, stored) -> None:
        fast.append(times["batch 4"])
        fall_back_to_eager(prepared, section, times, stored)

    monkeypatch.setattr(slower, "fall_back_to_eager", recorded)
    monkeypatch.setattr(slower, "is_fast_enough", lambda times: times is fast[0])


@pytest.mark.usefixtures("fast_batch_of_4")
def test_a_partition_of_a_fast_case_stays(archive, pairs) -> None:
    section = {"warmup": {"inputs": WARMUP["inputs"]}, "batching": {"buckets": [1, 4]}}
    report = started(archive, section, weights=save_weights, batch_size=4).describe_handle()
    # The graph of a batch of 1 is another one.
    assert len(slower_ones(report)) == 1 and report["summary"]["partitions"] == 1
    (fallback,) = slower_ones(report)
    assert fallback["reason"].endswith("at batch 1")


def test_calls_from_the_cache_step_aside_too(archive, pairs, tmp_path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    pt2 = {"compile": {"backend": "openvino", "options": options}}
    reports = []
    for _ in range(2):
        handler = started(archive, {"warmup": WARMUP}, pt2, weights=save_weights)
        x = torch.randn(1, 4)
        assert torch.equal(handler.model(x), handler.eager_model(x))
        reports.append(handler.describe_handle())
    cold, warm = reports
    assert warm["cache"]["calls"]["hits"] == 1 and warm["summary"]["coverage"] == 0.0
    assert [each["op"] for each in slower_ones(warm)] == [each["op"] for each in slower_ones(cold)] != []


# --- decided once -------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(pairs, monkeypatch) -> list[int]:
    """Counts the measurements; each next one finds OpenVINO twice as fast as the one before."""
    counts: list[int] = []
    timed = slower.paired_seconds

    def counted(*given: Any, **named: Any) -> list[tuple[float, float]]:
        counts.append(1)
        found = timed(*given, **named)
        pairs[:] = [each / 2 for each in pairs]
        return found

    monkeypatch.setattr(slower, "paired_seconds", counted)
    return counts


def _cached(tmp_path, **options: Any) -> dict[str, Any]:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache"), **options}
    return {"compile": {"backend": "openvino", "options": options}}


def test_a_second_worker_takes_the_stored_decision_without_measuring(archive, measured, tmp_path) -> None:
    reports = [
        started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights).describe_handle()
        for _ in range(2)
    ]
    assert len(measured) == 1
    first, second = (slower_ones(report) for report in reports)
    # A stored graph knows its file by name alone.
    places = [Path(report[0].pop("where")).name for report in (first, second)]
    assert first == second and len(first) == 1 and places[0] == places[1]
    assert [report["summary"]["coverage"] for report in reports] == [0.0, 0.0]


@pytest.mark.usefixtures("whole_calls")
def test_a_call_as_a_whole_is_decided_once_as_well(archive, measured, tmp_path) -> None:
    for _ in range(2):
        handler = started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights)
        (fallback,) = slower_ones(handler.describe_handle())
        assert fallback["op"] == "the model" and handler.describe_handle()["summary"]["partitions"] == 0
        x = torch.randn(1, 4)
        assert torch.equal(handler.model(x), handler.eager_model(x))
    assert len(measured) == 1


def test_that_nothing_is_slower_is_decided_once_as_well(archive, measured, pairs, tmp_path) -> None:
    pairs[:] = [1.0] * 20
    for _ in range(2):
        report = started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights).describe_handle()
        assert not slower_ones(report) and report["summary"]["coverage"] == 1.0
    assert len(measured) == 1


@pytest.mark.parametrize(
    "changed",
    [{"threads": 2}, {"fallback": {"allow": ["unsupported_op"]}}, {"precision": "bf16x3"}],
    ids=["threads", "policy", "precision"],
)
def test_it_is_measured_again_where_times_or_the_policy_may_differ(archive, measured, tmp_path, changed) -> None:
    if "precision" in changed and precision.no_bf16x3("CPU") is not None:
        pytest.skip("this CPU has no bf16x3")
    base = {"warmup": WARMUP, "threads": 1}
    started(archive, base, _cached(tmp_path), weights=save_weights)
    report = started(archive, {**base, **changed}, _cached(tmp_path), weights=save_weights).describe_handle()
    assert len(measured) == 2 and not slower_ones(report)


def test_without_a_cache_each_start_measures(archive, measured, tmp_path) -> None:
    for _ in range(2):
        started(archive, {"warmup": WARMUP}, _cached(tmp_path, model_caching=False), weights=save_weights)
    assert len(measured) == 2


def _damaged(manifest: dict[str, Any]) -> str:
    manifest["body"]["partitions"][0]["eager"] = -1
    return json.dumps(manifest)


@pytest.mark.parametrize("damage", [lambda manifest: "{", lambda manifest: "", _damaged], ids=["cut", "empty", "wrong"])
def test_a_damaged_decision_is_measured_again(archive, measured, tmp_path, damage) -> None:
    started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights)
    (stored,) = (tmp_path / "cache").rglob("entries/placement/**/*.json")
    stored.write_text(damage(json.loads(stored.read_text())))
    for _ in range(2):
        report = started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights).describe_handle()
        assert not slower_ones(report)
    assert len(measured) == 2


def test_a_body_that_is_no_placement_is_measured_again(archive, measured, monkeypatch, tmp_path) -> None:
    started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights)
    monkeypatch.setattr(
        Placement, "model_validate", classmethod(lambda cls, body: TypeAdapter(int).validate_python(body))
    )
    report = started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights).describe_handle()
    assert len(measured) == 2 and not slower_ones(report)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_call_of_one_shape_runs_in_the_eager_model_and_others_do_not(
    archive, whole_calls, fast_batch_of_4, monkeypatch, frozen
) -> None:
    warmup = {"inputs": WARMUP["inputs"]}
    section = {"warmup": warmup, "batching": {"buckets": [1, 4]}, "freeze": frozen}
    handler = started(archive, section, weights=save_weights, batch_size=4)
    report = handler.describe_handle()
    (fallback,) = slower_ones(report)
    assert fallback["op"] == "the model" and fallback["reason"].endswith("at batch 1")
    assert [graph["partitions"][0]["runs_on"] for graph in report["graphs"]] == ["eager", "openvino"]
    calls: list[int] = []
    run = FreezingRunner._guarded if not frozen else Route.__call__

    def counted(self, *given: Any) -> Any:
        calls.append(1)
        return run(self, *given)

    monkeypatch.setattr(*((Route, "__call__") if frozen else (FreezingRunner, "_guarded")), counted)
    for rows in (1, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(handler.model(x), handler.eager_model(x))
    assert len(calls) == 2, "a batch of 1 is not run by OpenVINO"


@pytest.mark.parametrize("shape", [[4], [2, 4]])
def test_it_is_measured_again_for_another_shape(archive, measured, tmp_path, shape) -> None:
    started(archive, {"warmup": WARMUP}, _cached(tmp_path), weights=save_weights)
    started(archive, {"warmup": {"inputs": [{"shape": shape}]}}, _cached(tmp_path), weights=save_weights)
    assert len(measured) == (1 if shape == [4] else 2)


@pytest.mark.skipif(precision.no_bf16x3("CPU") is not None, reason="this CPU has no bf16x3")
def test_it_is_measured_again_in_another_precision_of_the_options(archive, measured, tmp_path) -> None:
    for stated in ({}, {"precision": "bf16x3"}):
        started(archive, {"warmup": WARMUP}, _cached(tmp_path, **stated), weights=save_weights)
    assert len(measured) == 2
