"""What may be tried, and which keys it changes."""

import dataclasses
from typing import Any

import pytest
import yaml

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.serving.threads import plan_threads
from torchserve_openvino.tune.candidates import (
    Candidate,
    ComputeSettings,
    changes,
    engines,
    precision_is_pinned,
    present_of,
    ranked,
)  # fmt: skip
from torchserve_openvino.tune.keys import HINT, PRECISION, with_changes
from torchserve_openvino.tune.settings import Settings, read_settings
from torchserve_openvino.tune.writing import changed_yaml

YAML = """\
# The photo service.
minWorkers: 2       # two
maxWorkers: 2
batchSize: 16
pt2:
  compile:
    enable: true
    backend: openvino
    options:
      config: {INFERENCE_PRECISION_HINT: f32}   # exact
handler:
  openvino:
    threads: auto   # cores divided by the workers
    warmup: {inputs: [{shape: [4]}]}
"""


def config(text: str = YAML) -> dict[str, Any]:
    return yaml.safe_load(text)


def test_the_present_configuration_is_read_with_its_defaults() -> None:
    assert present_of(config(), 4) == Candidate(ComputeSettings("f32", 2), 2, 16, 100)
    assert present_of({}, 4) == Candidate(ComputeSettings("f32", 4), 1, 1, 100)
    streams = {"handler": {"openvino": {"precision": "bf16", "execution": {"mode": "throughput"}}}}
    assert present_of(streams, 8) == Candidate(ComputeSettings("bf16", 8, 2), 1, 1, 100)


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_the_present_configuration_computes_as_the_worker_plans_it(cores: int, most: int) -> None:
    section = {"execution": {"mode": "throughput"}} if cores // most > 1 else {}
    text = {"minWorkers": 1, "maxWorkers": most, "handler": {"openvino": section}}
    plan = plan_threads(
        "auto", workers=most, streams="auto", throughput=bool(section), ov_config={}, device="CPU", cores=cores, env={}
    )
    assert present_of(text, cores).engine == ComputeSettings("f32", plan.openvino_threads, plan.streams)


def test_a_number_of_streams_leaves_with_the_mode_that_has_it() -> None:
    text = config(YAML + "    execution: {mode: throughput, streams: 2}\n")
    present = present_of(text, 4)
    single = dataclasses.replace(present, engine=ComputeSettings("f32", 2))
    changed = with_changes(text, changes(single, present, text))
    assert changed["handler"]["openvino"]["execution"] == {"mode": "latency", "streams": "auto"}
    assert present_of(changed, 4) == single


def test_engines_share_the_cores_in_each_way() -> None:
    ways = [each for each in engines(present_of(config(), 4), 4, ["f32", "bf16"]) if each.precision == "bf16"]
    assert {(each.threads, each.streams) for each in ways} == {(1, 1), (2, 1), (4, 1), (4, 4)}


def test_requests_that_join_in_the_engine_are_not_batched() -> None:
    present = present_of({**config(), "asyncCommunication": True, "batchSize": 1}, 4)
    ways = engines(present, 4, ["f32"])
    assert present.joins and {way.streams for way in ways} == {1}
    times = {way: {1: 100.0 / way.threads, 8: 200.0 / way.threads} for way in ways}
    chosen = ranked(present, times, Settings(), 4, 8)
    assert {(each.batch_size, each.delay_ms, each.joins) for each, _ in chosen} == {(1, 100, True)}
    # Eight at once in 200 ms with one thread.
    assert dict(chosen)[Candidate(ComputeSettings("f32", 1), 4, 1, 100, True)] == pytest.approx(4 * 40)


def test_candidates_stay_within_the_cores_and_what_the_user_names() -> None:
    present = present_of(config(), 2)
    times = {ComputeSettings("f32", 1): {1: 10.0, 8: 60.0}, ComputeSettings("f32", 2): {1: 6.0, 8: 35.0}}
    found = ranked(present, times, Settings(p99=100.0, batch_sizes=[1, 8], delays=[2]), 2, 4)
    assert found and all(each.workers * each.engine.threads <= 2 for each, _ in found)
    assert {each.delay_ms for each, _ in found} == {2}
    assert {each.engine.threads for each, _ in found} == {1, 2}
    assert ranked(present, {}, Settings(), 2, 4) == []


def test_only_what_differs_is_changed_and_everything_else_stays() -> None:
    present = present_of(config(), 2)
    chosen = Candidate(ComputeSettings("bf16", 2, 2), 1, 8, 5)
    changed = changes(chosen, present, config())
    text = changed_yaml(YAML, "net.yaml", changed, {("batchSize",): "1.8 times"})
    assert yaml.safe_load(text) == with_changes(config(), changed)
    assert present_of(yaml.safe_load(text), 2) == chosen
    kept = [line for line in YAML.splitlines() if line not in text.splitlines()]
    assert [line.split(":")[0].strip() for line in kept] == [
        "minWorkers", "maxWorkers", "batchSize", "config", "threads"
    ]  # fmt: skip
    for comment in ("# The photo service.", "# two", "# exact", "# cores divided by the workers", "# 1.8 times"):
        assert comment in text
    assert changes(present, present, config()) == {}


def test_a_pinned_precision_is_changed_where_it_is_pinned() -> None:
    other = Candidate(ComputeSettings("bf16", 1), 2, 16, 100)
    (path,) = changes(other, present_of(config(), 2), config())
    assert path[-1] == "INFERENCE_PRECISION_HINT"
    (path,) = changes(other, Candidate(ComputeSettings("f32", 1), 2, 16, 100), {})
    assert path == ("handler", "openvino", "precision")


def test_the_tuned_yaml_is_valid(tmp_path: Any) -> None:
    present = present_of(config(), 2)
    changed = changes(Candidate(ComputeSettings("bf16", 2, 2), 1, 8, 5), present, config())
    path = tmp_path / "model-config.yaml"
    path.write_text(changed_yaml(YAML, "net.yaml", changed, dict.fromkeys(changed, "tuned")))
    assert load_serving_config(path).openvino.execution.streams == 2


@pytest.mark.parametrize(
    "text",
    ["a: &x {b: 1}\nhandler: *x\n", "handler: {openvino: {threads: auto}}\n", "handler:\r\n  openvino: {}\r\n", ""],
)
def test_unusual_layouts_are_edited_rightly_or_refused(text: str) -> None:
    changed = {("handler", "openvino", "threads"): 2, ("batchSize",): 4}
    data = yaml.safe_load(text) or {}
    try:
        result = changed_yaml(text, "net.yaml", changed, {("batchSize",): "why"})
    except ConfigError as error:
        assert "by hand" in str(error) or "can't be set" in str(error)
    else:
        assert yaml.safe_load(result) == with_changes(data, changed)


def test_settings_say_what_is_wrong(tmp_path: Any) -> None:
    assert read_settings(None, {"p99": "50ms", "memory": "2GB"}).p99 == 50.0
    assert read_settings(None, {"p99": "0.3s"}).p99 == 300.0
    assert read_settings(None, {"memory": "512MiB"}).memory == 512 * 2**20
    for given, message in [
        ({"p99": "50 apples"}, "p99.*not a time such as 50ms"),
        ({"p99": "-1ms"}, "p99.*not a time"),
        ({"p99": 0}, "above 0"),
        ({"goal": "speed"}, "goal"),
        ({"goal": "latency"}, "needs a rate"),
        ({"p98": "1ms"}, "p98.*one of goal, p99"),
        ({"batch_sizes": [0]}, "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_settings(None, given)
    file = tmp_path / "tune.yaml"
    file.write_text("{goal: throughput, trials: 6}")
    assert read_settings(file, {"goal": None, "rate": 3.0}).trials == 6
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_settings(file, {})


def test_a_pinned_precision_is_changed_where_it_is() -> None:
    pinned = {"pt2": {"compile": {"options": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}}}
    for config, key in ((pinned, HINT), ({}, PRECISION)):
        assert precision_is_pinned(config) == (config is pinned)
        present = present_of(config, 2)
        other = dataclasses.replace(present, engine=dataclasses.replace(present.engine, precision="bf16"))
        assert changes(other, present, config) == {key: "bf16"}


def test_candidates_are_ranked_by_the_goal() -> None:
    present = present_of(config(), 4)
    # Batches help on one core; all cores answer a single request the fastest.
    times = {ComputeSettings("f32", 1): {1: 40.0, 8: 80.0}, ComputeSettings("f32", 4): {1: 12.0, 8: 60.0}}
    first = {
        goal: ranked(present, times, Settings(goal=goal, rate=rate, delays=[20]), 4, 4)[0][0]
        for goal, rate in (("throughput", None), ("latency", 5.0), ("cost", None))
    }
    assert first["throughput"].engine.threads == 1 and first["throughput"].batch_size > 1
    assert first["latency"].engine.threads == 4 and first["latency"].batch_size == 1
    # The rate of a worker with one core for each core.
    assert first["cost"].engine.threads == 1
