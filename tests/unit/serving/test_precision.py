"""One precision for a model: f32, what the YAML names, or what was measured once."""

import json
import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from own_handlers import BODY, Parts, start
from serving_worker import NETWORK, WARMUP, save_weights

from encoder import build
from torchserve_openvino.cache.storage import store
from torchserve_openvino.config import resolve_options
from torchserve_openvino.config.openvino.precisions import no_bf16x3
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.serving import compilation, precision
from torchserve_openvino.serving import precision_trial as trials_of
from torchserve_openvino.serving.precision import (
    StoredChoice,
    TimedPrecision,
    candidates,
    explain,
    ranking,
    sure_median,
    with_precision,
)
from torchserve_openvino.serving.stored_decision import StoredDecision
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.serving.verification import verify
from torchserve_openvino.tasks.tensor import TensorHandler


def trial(
    name: str, gain: float = 1.0, passed: bool = True, coverage: float = 1.0, sure: float | None = None
) -> TimedPrecision:
    verify = {"passed": passed, "max_abs": 0.1, "cosine": 1.0}
    return TimedPrecision(name, verify, gain, gain if sure is None else sure, coverage)


@pytest.fixture
def has_bf16(monkeypatch) -> None:
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "BF16", "INT8"])
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: "needs a CPU with AMX.")


def gains(monkeypatch, *pairs: float) -> list[int]:
    """Makes timing return these gains; the returned list gets an element for each call."""
    asked: list[int] = []

    def timed(first, second, seconds) -> list[float]:
        first(), second()
        asked.append(1)
        return list(pairs) * 10

    monkeypatch.setattr(precision, "timed_pairs", timed)
    return asked


def served(made) -> tuple[dict, torch.Tensor]:
    handler = TensorHandler()
    handler.initialize(made.context)
    return handler.describe_handle(), handler.model(torch.linspace(-1, 1, 4)[None])


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial("f32")], "f32"),
        ([trial("f32"), trial("bf16", 2)], "bf16"),
        ([trial("f32"), trial("bf16", 2, passed=False)], "f32"),
        ([trial("f32"), trial("bf16", 2, passed=False), trial("f16", 1.5)], "f16"),
        ([trial("f32"), trial("bf16", 1.5), trial("f16", 2)], "f16"),
        ([trial("f32"), trial("bf16", 1.09)], "f32"),
        # The median is faster, but its lower bound is not.
        ([trial("f32"), trial("bf16", 1.5, sure=1.05)], "f32"),
        # The plugin lacks a kernel: fast and correct answers of eager PyTorch do not count.
        ([trial("f32"), trial("f16", 2, coverage=0.0)], "f32"),
        # A model that is wrong in f32 is refused, not served in a precision with a wider tolerance.
        ([trial("f32", passed=False), trial("bf16", 2)], "f32"),
    ],
)
def test_choice(trials, chosen) -> None:
    assert ranking(trials)[0] == chosen and ranking(trials)[-1] == "f32"
    assert explain(trials)["chosen"] == chosen


def test_a_candidate_whose_answers_are_no_numbers_is_stored_as_rejected(archive, tmp_path) -> None:
    inf, nan = float("inf"), float("nan")
    lost = {
        "passed": False,
        "max_abs": inf,
        "cosine": nan,
        "measure": {"name": "probability", "bound": 0.02, "worst": nan},
    }
    facts = explain([trial("f32"), TimedPrecision("f16", lost, 2.0, 2.0, 1.0)])
    assert facts["chosen"] == "f32" and facts["tried"]["f16"]["max_abs"] == "inf"
    assert StoredChoice.model_validate(json.loads(json.dumps(facts, allow_nan=False))).tried["f16"].cosine == "nan"


def test_a_sure_median_is_below_the_median_of_the_population_as_often_as_it_says() -> None:
    draw = random.Random(0)
    for n in (8, 15, 41):
        below = sum(sure_median([draw.lognormvariate(0, 1) for _ in range(n)]) <= 1.0 for _ in range(2000))
        assert below / 2000 >= 0.94
    assert sure_median([3.0] * 4) == float("-inf"), "four values can't be 95 % sure"
    assert sure_median(range(1, 9)) == 2


def test_candidates_come_from_the_device_and_a_stated_precision_wins(has_bf16, monkeypatch) -> None:
    assert candidates(resolve_options({})) == ["f32", "bf16"]
    assert candidates(resolve_options({"device": "AUTO:CPU"})) == ["f32"]
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "FP16", "BF16"])
    assert candidates(resolve_options({})) == ["f32", "bf16"], "f16 is for devices without bf16"
    monkeypatch.setattr(precision, "device_capabilities", lambda device: ["FP32", "FP16"])
    assert candidates(resolve_options({})) == ["f32", "f16"]
    assert precision.is_open(resolve_options({}))
    assert not precision.is_open(resolve_options({"config": {"INFERENCE_PRECISION_HINT": "f32"}}))
    assert not precision.is_open(resolve_options({"config": {"EXECUTION_MODE_HINT": "ACCURACY"}}))
    assert not precision.is_open(None)


def test_what_the_device_lacks_is_refused_by_name(has_bf16) -> None:
    assert with_precision(resolve_options({}), "bf16", "x").options.config["INFERENCE_PRECISION_HINT"] == "bf16"
    with pytest.raises(ConfigError, match=r"precision.*f16.*CPU.*f32, bf16"):
        with_precision(resolve_options({}), "f16", "x")


def test_bf16x3_is_a_candidate_after_bf16_where_the_cpu_has_amx(has_bf16, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"precision: is bf16x3, which needs a CPU with AMX"):
        with_precision(resolve_options({}), "bf16x3", "x")
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: None)
    assert candidates(resolve_options({})) == ["f32", "bf16", "bf16x3"]
    assert (
        with_precision(resolve_options({}), "bf16x3", "x").options.ov_config()["INFERENCE_PRECISION_HINT"] == "bf16x3"
    )


@pytest.mark.skipif(no_bf16x3("CPU") is not None, reason="needs a CPU with AMX")
def test_bf16x3_is_served_within_the_tolerance_of_f32(archive) -> None:
    warmup = {"inputs": [{"shape": [64, 384], "dtype": "float32"}], "batch_sizes": [1]}
    source = NETWORK.replace("Linear(4, 8)", "Linear(384, 512)").replace("Linear(8, 3)", "Linear(512, 384)")
    made = archive(
        {"handler": {"openvino": {"warmup": warmup, "precision": "bf16x3"}}},
        model_file=source,
        weights=lambda path: torch.save(build(source, "Network").state_dict(), path),
    )
    handler = TensorHandler()
    handler.initialize(made.context)
    report = handler.describe_handle()
    assert report["summary"]["precision"] == "bf16x3" and report["summary"]["products"]["bf16x3"] == 2
    assert report["verify"]["passed"] and report["verify"]["tolerance"] == "0.001 of the largest value (bf16x3)"


def test_f32_is_the_default_and_nothing_is_tried(archive, has_bf16, monkeypatch) -> None:
    asked = gains(monkeypatch, 2.0)
    report, _ = served(archive({"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights))
    assert report["summary"]["precision"] == "f32" and not asked
    assert report["config"]["options"]["config.INFERENCE_PRECISION_HINT"]["value"] == "f32"


@pytest.mark.parametrize("stated", ["f16", "auto"])
def test_a_precision_that_the_options_contradict_is_refused(archive, has_bf16, stated) -> None:
    yaml = {
        "pt2": {"compile": {"backend": "openvino", "options": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}},
        "handler": {"openvino": {"warmup": WARMUP, "precision": stated}},
    }
    both = f"handler.openvino.precision: is {stated}, but .*options.config.INFERENCE_PRECISION_HINT is f32.*remove"
    with pytest.raises(RuntimeError, match=both):
        served(archive(yaml, weights=save_weights))


@pytest.mark.parametrize(("stated", "served_in"), [("bf16", "bf16"), ("auto", "f32")])
def test_a_model_of_unknown_inputs_follows_the_key_too(archive, has_bf16, stated, served_in) -> None:
    made = archive({"handler": {"openvino": {"precision": stated}}}, weights=save_weights)
    report, _ = served(made)
    assert report["config"]["options"]["config.INFERENCE_PRECISION_HINT"]["value"] == served_in
    if stated == "auto":
        assert "inputs are unknown" in report["config"]["precision_choice"]["why"]


@pytest.mark.parametrize(("stated", "served_in"), [("bf16", "bf16"), ("auto", "f32")])
def test_a_model_that_no_sample_calls_follows_it_too(archive, has_bf16, stated, served_in) -> None:
    made, handler = start(archive, Parts, precision=stated)
    made.handle(handler, BODY)
    # The root has no call before READY, so that nobody compares it.
    with torch.no_grad():
        handler.model(torch.zeros(1, 4))
    report = worker_of(handler).report.to_dict()
    assert report["config"]["options"]["config.INFERENCE_PRECISION_HINT"]["value"] == served_in
    if stated == "auto":
        assert any("auto is f32 for self.model: no call of it is known" in note for note in report["notes"])


def test_auto_measures_once_and_all_workers_follow(archive, has_bf16, monkeypatch) -> None:
    asked = gains(monkeypatch, 1.5, 1.4)
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}, weights=save_weights)
    first, answer = served(made)
    choice = first["config"]["precision_choice"]
    assert asked == [1] and set(choice["tried"]) == {"f32", "bf16"} and choice["tried"]["f32"]["passed"]
    assert choice["chosen"] == "bf16" and choice["tried"]["bf16"]["at_least"] == 1.4
    option = first["config"]["options"]["config.INFERENCE_PRECISION_HINT"]
    assert option["value"] == "bf16" and "auto" in option["source"]
    assert first["verify"]["passed"] and first["serving"]["compiles_after_ready"] == 0
    # Another worker uses the stored decision and does not measure.
    monkeypatch.setattr(precision, "timed_pairs", lambda *calls: pytest.fail("measured again"))
    second, again = served(made)
    assert second["config"]["precision_choice"]["chosen"] == "bf16" and torch.equal(answer, again)
    assert second["config"]["precision_choice"]["decided"]


def test_a_decision_goes_with_the_cache_and_is_made_again_for_other_weights(
    archive, has_bf16, monkeypatch, tmp_path
) -> None:
    asked = gains(monkeypatch, 1.0)
    cache = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    yaml = {
        "pt2": {"compile": {"backend": "openvino", "options": cache}},
        "handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}},
    }
    made = archive(yaml, weights=save_weights)
    assert served(made)[0]["config"]["precision_choice"]["chosen"] == "f32"
    # A restart unpacks the archive again, so the decision must be in the cache.
    weights = Path(made.context.system_properties["model_dir"]) / "weights.pth"
    assert not (weights.parent / precision.FOLDER).exists()
    served(made)
    assert asked == [1]
    torch.manual_seed(7)
    state = {name: torch.randn_like(v) for name, v in torch.load(weights).items()}
    torch.save(state, weights)
    served(made)
    assert asked == [1, 1]


def test_auto_without_verification_is_f32_and_says_so(archive, has_bf16, monkeypatch) -> None:
    asked = gains(monkeypatch, 2.0)
    section = {"warmup": WARMUP, "precision": "auto", "verify": {"against": "off"}}
    report, _ = served(archive({"handler": {"openvino": section}}, weights=save_weights))
    assert report["summary"]["precision"] == "f32" and not asked
    assert "against is off" in report["config"]["precision_choice"]["why"]


def test_a_decision_that_cannot_be_stored_is_not_used(archive, has_bf16, monkeypatch) -> None:
    gains(monkeypatch, 2.0)
    monkeypatch.setattr(StoredDecision, "save", lambda self, decision: False)
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}, weights=save_weights)
    choice = served(made)[0]["config"]["precision_choice"]
    assert choice["chosen"] == "f32" and "cannot be stored" in choice["why"]


def test_a_trial_compiles_three_shapes_and_all_are_compiled_once_in_the_chosen_precision(
    archive, has_bf16, monkeypatch
) -> None:
    gains(monkeypatch, 1.5)
    warmed: list[tuple[str, list[str]]] = []
    warm_up = compilation.warm_up

    def recorded(compiled, served, cases, planned) -> float:
        warmed.append((served.compiled.report.summary.precision, [case.name for case in cases]))
        return warm_up(compiled, served, cases, planned)

    monkeypatch.setattr(compilation, "warm_up", recorded)
    warmup = {"inputs": [{"shape": ["length", 4]}]}
    dims = {"mode": "exact", "dims": {"length": [2, 3, 4, 8]}}
    section = {"warmup": warmup, "batching": dims, "precision": "auto"}
    handler = TensorHandler()
    handler.initialize(archive({"handler": {"openvino": section}}, weights=save_weights, batch_size=3).context)
    report = handler.describe_handle()
    few = ["batch 1, length 2", "batch 1, length 8", "batch 3, length 8"]
    assert [names for _, names in warmed[:2]] == [few, few]
    assert len(warmed) == 3 and len(warmed[2][1]) == 12
    choice = report["config"]["precision_choice"]
    assert choice["chosen"] == "bf16" and choice["cases"] == few
    assert report["verify"]["passed"] and report["verify"]["cases"] == 12
    # The three shapes of the trial are not traced again, and are in the report like the others.
    assert report["cache"]["traces"] == 9 and report["summary"]["graphs"] == 12


def test_calls_that_are_no_single_graph_are_traced_for_each_precision_and_their_breaks_counted(
    archive, has_bf16, monkeypatch
) -> None:
    gains(monkeypatch, 1.5)
    network = NETWORK.replace("return self", "torch._dynamo.graph_break(); return self")
    config = {"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}
    made = archive(config, model_file=network, weights=save_weights)
    report, answer = served(made)
    assert report["config"]["precision_choice"]["chosen"] == "bf16" == report["summary"]["precision"]
    assert report["summary"]["graph_breaks"] == 1 and report["cache"]["traces"] > 0
    assert answer.shape[0] == 1


def test_where_bf16_is_right_three_products_of_it_are_not_tried(archive, has_bf16, monkeypatch) -> None:
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: None)
    asked = gains(monkeypatch, 1.5)
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}, weights=save_weights)
    choice = served(made)[0]["config"]["precision_choice"]
    assert choice["chosen"] == "bf16" and len(asked) == 1
    assert "one product where this needs three" in choice["not_tried"]["bf16x3"]


def test_without_time_for_another_precision_f32_is_served_and_the_report_says_so(
    archive, has_bf16, monkeypatch
) -> None:
    asked = gains(monkeypatch, 2.0)
    monkeypatch.setattr(trials_of, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(trials_of, "TIMES_F32", 0.0)
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}, weights=save_weights)
    choice = served(made)[0]["config"]["precision_choice"]
    assert choice["chosen"] == "f32" and not asked and set(choice["tried"]) == {"f32"}
    assert "0.0 s of the 0 s for trials are left" in choice["not_tried"]["bf16"]
    assert "handler.openvino.precision" in choice["not_tried"]["bf16"]
    # The decision is stored nevertheless.
    assert served(made)[0]["config"]["precision_choice"]["decided"]


def test_a_model_that_takes_long_to_compile_has_time_for_one_trial(archive, has_bf16, monkeypatch) -> None:
    gains(monkeypatch, 2.0)
    monkeypatch.setattr(trials_of, "BUDGET_SECONDS", 0.0)
    # Whatever bf16 takes here.
    monkeypatch.setattr(trials_of, "TIMES_F32", 1e3)
    made = archive({"handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}}}, weights=save_weights)
    assert served(made)[0]["config"]["precision_choice"]["chosen"] == "bf16"


def test_timing_ends_with_the_time_limit_and_too_few_pairs_decide_nothing() -> None:
    assert precision.timed_pairs(lambda: None, lambda: None, 0.0) == []
    pairs = precision.timed_pairs(lambda: time.sleep(0.02), lambda: time.sleep(0.01), 0.1)
    assert 2 <= len(pairs) < precision.MIN_PAIRS
    assert len(precision.timed_pairs(lambda: None, lambda: None, 9.0, enough=0.0)) == precision.MIN_PAIRS
    assert sure_median([3.0] * precision.LEAST_PAIRS) == 3.0


def test_a_precision_that_fails_at_a_shape_outside_its_trial_is_replaced_by_the_next_one(
    archive, has_bf16, monkeypatch
) -> None:
    gains(monkeypatch, 1.5)
    # A batch of 2 is neither the smallest nor the largest, and in bf16 it is wrong.
    compare = verify.compare

    def compared(compiled, eager, cases, judge, *rest, **how):
        result = compare(compiled, eager, cases, judge, *rest, **how)
        if judge.precision == "bf16" and any(case.name == "batch 2" for case in cases):
            result |= {"passed": False, "problems": ["batch 2, random: differs"]}
        return result

    monkeypatch.setattr(verify, "compare", compared)
    section = {"warmup": {"inputs": WARMUP["inputs"]}, "precision": "auto", "batching": {"buckets": [1, 2, 4]}}
    made = archive({"handler": {"openvino": section}}, weights=save_weights, batch_size=4)
    report, _ = served(made)
    choice = report["config"]["precision_choice"]
    assert choice["tried"]["bf16"]["passed"] and choice["chosen"] == "f32" == report["summary"]["precision"]
    assert "batch 2, random: differs" in choice["rejected"]["bf16"] and report["verify"]["passed"]
    assert report["summary"]["graphs"] == 3, "what was compiled in bf16 is not in the report"
    # The other workers do not compile it in bf16 again.
    again = served(made)[0]["config"]["precision_choice"]
    assert again["chosen"] == "f32" and again["decided"] and again["rejected"] == choice["rejected"]


def test_the_trial_of_a_second_model_leaves_the_first_one_compiled(archive, has_bf16, monkeypatch) -> None:
    gains(monkeypatch, 1.5)
    made, handler = start(archive, Parts, precision="auto", batch_size=4)
    for count in (1, 3, 4, 2):
        made.handle(handler, *[BODY] * count)
        assert made.status(count - 1) == 200
    report = handler.describe_handle()
    assert report["serving"]["compiles_after_ready"] == 0, report["recompiles"]


@pytest.mark.parametrize(
    "changed",
    [
        {"options": {"disabled_ops": ["aten.relu"]}}, {"backend": "export"},
        {"warmup": {"inputs": [{"shape": [2, 4]}]}},
    ],
    ids=["disabled_ops", "backend", "shape"],
)  # fmt: skip
def test_a_decision_is_made_again_where_something_else_runs_on_openvino(
    archive, has_bf16, monkeypatch, tmp_path, changed
) -> None:
    asked = gains(monkeypatch, 1.5)
    for more in ({}, {}, changed):
        options = {"model_caching": True, "cache_dir": str(tmp_path / "cache"), **more.get("options", {})}
        yaml = {
            "pt2": {"compile": {"backend": more.get("backend", "openvino"), "options": options}},
            "handler": {"openvino": {"warmup": more.get("warmup", WARMUP), "precision": "auto"}},
        }
        handler = TensorHandler()
        handler.initialize(archive(yaml, weights=save_weights).context)
    assert asked == [1, 1]


def test_a_decision_is_kept_beside_the_model_where_the_cache_is_denied(
    archive, has_bf16, monkeypatch, tmp_path
) -> None:
    asked = gains(monkeypatch, 1.5)
    monkeypatch.setattr(store, "open_root", partial(_denied, store.open_root, tmp_path / "cache"))
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    yaml = {
        "pt2": {"compile": {"backend": "openvino", "options": options}},
        "handler": {"openvino": {"warmup": WARMUP, "precision": "auto"}},
    }
    made = archive(yaml, weights=save_weights)
    for _ in range(2):
        assert served(made)[0]["config"]["precision_choice"]["chosen"] == "bf16"
    assert asked == [1]


def _denied(open_root, folder: Path, path: Path, **how):
    root = open_root(path, **how)
    return root._replace(why_read_only="it may not be written to") if path == folder else root
