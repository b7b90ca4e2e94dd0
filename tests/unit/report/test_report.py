"""The report's public schema, counts and text."""

import json
import threading

from torchserve_openvino.report import FALLBACK_KINDS, CompileReport, Tracker
from torchserve_openvino.report.records import GraphRecord, PartitionRecord


def example() -> Tracker:
    tracker = Tracker()
    tracker.config.update(effective_device="CPU", effective_precision="f32", folder=object())
    graph = tracker.add_graph(GraphRecord("0/0", "model.py:3", "inference", ops_total=10))
    graph.lower_seconds = 0.5
    graph.partitions.append(PartitionRecord("openvino_0", 6, convert_seconds=0.25, compile_seconds=0.25))
    graph.partitions.append(PartitionRecord("openvino_1", 3, runs_on="eager"))
    tracker.add_fallback("unsupported_op", "aten.digamma.default", to="eager", reason="none", where="model.py:4")
    tracker.add_fallback("graph_break", "python", reason="print", where="model.py:9")
    tracker.add_recompile("model.py:1", "size mismatch", "0/1")
    return tracker


def test_schema_of_the_design() -> None:
    report = CompileReport(example()).to_dict()
    assert report["schema"] == 1
    expected = "environment config summary graphs fallbacks graph_breaks recompiles cache verify timings".split()
    assert report.keys() >= set(expected)
    assert report["summary"] == {
        "ops_total": 10, "ops_on_openvino": 6, "coverage": 0.6, "graphs": 1, "partitions": 1, "graph_breaks": 1,
        "fallbacks": 2, "recompiles": 1, "compile_seconds": 1.0, "device": "CPU", "precision": "f32",
        "precisions": {},
    }  # fmt: skip
    assert report["fallbacks"][0].keys() == {"kind", "op", "to", "count", "reason", "where"}
    assert {"torch", "openvino", "torchserve", "cpu", "pid"} <= report["environment"].keys()
    assert json.loads(json.dumps(report)) == report


def test_the_same_cause_counts_up_and_is_new_once() -> None:
    tracker = Tracker()
    cause = {"to": "eager", "reason": "r", "where": "w"}
    assert tracker.add_fallback("runtime_failed", "p", **cause)
    assert not tracker.add_fallback("runtime_failed", "p", **cause)
    assert tracker.add_fallback("runtime_failed", "q", **cause)
    assert tracker.fallback_counts() == {"runtime_failed": 3}
    assert [f.count for f in CompileReport(tracker).fallbacks] == [2, 1]


def test_counts_from_many_threads() -> None:
    tracker = Tracker()

    def work() -> None:
        for _ in range(500):
            tracker.add_fallback("runtime_failed", "p", to="eager", reason="r")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.fallback_counts() == {"runtime_failed": 4000}


def test_the_revision_moves_with_every_change() -> None:
    tracker = Tracker()
    report = CompileReport(tracker)
    changes = [
        lambda: tracker.add_graph(GraphRecord("0/0", "", "inference", ops_total=1)),
        lambda: tracker.add_fallback("disabled_op", "o", to="eager", reason="r"),
        lambda: tracker.add_recompile("w", "r", "0/1"),
        lambda: tracker.add_fallback("graph_break", "python", reason="r", where="w"),
        lambda: tracker.verify.state({"passed": True}),
        lambda: tracker.add_timing("load", 1.0),
        lambda: tracker.add_note("remark"),
    ]
    for change in changes:
        before = report.revision
        change()
        assert report.revision > before
    before = report.revision
    tracker.add_note("remark")
    assert report.revision == before


def test_coverage_before_any_graph_and_without_work() -> None:
    tracker = Tracker()
    assert CompileReport(tracker).summary.coverage == 0.0
    tracker.add_graph(GraphRecord("0/0", "", "inference", ops_total=0))
    assert CompileReport(tracker).summary.coverage == 1.0


def test_text_names_everything_that_matters() -> None:
    report = CompileReport(example())
    text = report.to_text()
    for word in (
        "60.0%",
        "aten.digamma.default",
        "model.py:4",
        "print",
        "model.py:9",
        "size mismatch",
        "openvino_0",
        "f32",
    ):
        assert word in text
    line = report.summary_line()
    assert "\n" not in line and "unsupported_op 1" in line and "graph_break 1" in line and "device CPU" in line


def test_kinds_are_those_of_the_design() -> None:
    design = "graph_break unsupported_op disabled_op conversion_failed compile_failed runtime_failed".split()
    # A piece that is quicker in eager PyTorch is none of those, nor is one that OpenVINO's compiler does not survive.
    assert set(FALLBACK_KINDS) == {*design, "compile_died", "outside_compiled", "slower", "tiny_partition"}


def test_the_comparison_with_eager_fits_on_a_line() -> None:
    from torchserve_openvino.report.text import verify_line

    figures = {"max_abs": 7.21e-06, "max_rel": 0.0032, "cosine": 0.99999, "top1_agreement": None, "outputs": [{}]}
    line = verify_line({"passed": True, "cases": 3, "problems": [], **figures})
    assert line == "passed, 3 case(s), max abs 7.21e-06, cosine 0.99999"
    assert verify_line({"passed": False, "cases": 1, "problems": ["output 0 differs"]}).endswith("output 0 differs")


def test_planned_compilations_are_no_recompiles() -> None:
    tracker = Tracker()
    with tracker.planned_compilation():
        tracker.add_recompile("net.py:3", "size mismatch", "0/1")
    assert CompileReport(tracker).summary.recompiles == 0
    tracker.add_recompile("net.py:3", "size mismatch", "0/2")
    assert CompileReport(tracker).summary.recompiles == 1
