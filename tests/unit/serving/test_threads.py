"""The cores that a worker may use, and the threads and streams that it plans for them."""

import json
import os

import numpy as np
import openvino
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as ops

from torchserve_openvino.errors import ConfigError
from torchserve_openvino.serving.threads import plan_threads, usable_cores

STREAMS = "handler.openvino.execution.streams"
MODE = "handler.openvino.execution.mode"
CONFIG = "pt2.compile.options.config"
NUM_STREAMS, THREADS = f"{CONFIG}.NUM_STREAMS", f"{CONFIG}.INFERENCE_NUM_THREADS"
counts = st.integers(1, 64)


def plan(setting="auto", **changes):
    """Returns a plan; by default for one worker on a CPU with 8 cores, in latency mode, without explicit numbers."""
    usual = {"workers": 1, "streams": "auto", "throughput": False, "ov_config": {}, "device": "CPU", "cores": 8}
    return plan_threads(setting, **{**usual, "env": {}, **changes})


# --- cores --------------------------------------------------------------------------------------------------


@pytest.fixture
def cores_of(tmp_path, monkeypatch):
    """`usable_cores` for cgroup files (path: text) and the lines of /proc/self/cgroup, with 16 cores of affinity."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def cores(files, membership):
        root = tmp_path / "cgroup"
        root.mkdir()
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if membership is not None:
            (tmp_path / "membership").write_text(membership)
        return usable_cores(root, tmp_path / "membership")

    return cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"a/b/cpu.max": "250000 100000\n"}, 2),
        ({"a/b/cpu.max": "50000 100000\n"}, 1),
        ({"a/b/cpu.max": "6400000 100000\n"}, 16),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ({"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "700000 100000\n", "cpu.max": "900000 100000\n"}, 5),
        ({"a/b/c/cpu.max": "100000 100000\n", "other/cpu.max": "100000 100000\n"}, 16),
        ({"unified/a/cpu.max": "300000 100000\n"}, 3),
    ],
)
def test_quotas_of_cgroup_v2(cores_of, files, expected) -> None:
    assert cores_of(files, "0::/a/b\n") == expected


def v1(folder, quota, period="100000"):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v1("cpu", -1), 16),
        (v1("cpu", 300000), 3),
        (v1("cpu/a/b", 150000, 50000), 3),
        (v1("cpu,cpuacct/a", 200000), 2),
        (v1("cpu/a", 200000) | v1("cpu/a/b", -1) | v1("cpu", -1), 2),
        (v1("memory/a", 100000), 16),
        ({"cpu/cpu.cfs_quota_us": "300000"}, 16),
        (v1("cpu/a", 800000) | {"unified/z/cpu.max": "600000 100000"}, 6),
    ],
)
def test_quotas_of_cgroup_v1(cores_of, files, expected) -> None:
    assert cores_of(files, "9:memory:/a\n4:cpu,cpuacct:/a/b\n0::/z\n") == expected


def test_a_container_without_a_cgroup_namespace(cores_of) -> None:
    # The membership has the host's path; the mount's root is the container's own cgroup.
    assert cores_of(v1("cpu", 200000), "4:cpu:/docker/1f\n") == 2


def test_a_cgroup_outside_the_namespace_is_not_followed(cores_of) -> None:
    assert cores_of({"cpu.max": "300000 100000", "../secret/cpu.max": "100000 100000"}, "0::/../secret\n") == 3


@pytest.mark.parametrize("membership", [None, "", "0", "::\n:", "nonsense\n0::/a\n"])
def test_a_broken_membership_leaves_the_roots_quota(cores_of, membership) -> None:
    assert cores_of({"cpu.max": "200000 100000"}, membership) == 2


LIMITLESS = ["", "max", "-1 1", "0 1", "1 0", "200000", "2 1 1", "x y", "2e5 1e5", "1.5 1", b"\xff", "9" * 5000 + " 1"]


@pytest.mark.parametrize("text", LIMITLESS)
def test_a_malformed_quota_is_none(cores_of, text) -> None:
    assert cores_of({"cpu.max": text, "cpu/cpu.cfs_quota_us": text}, "0::/\n4:cpu:/\n") == 16


@pytest.mark.parametrize(("quota", "period"), [("2 1", ""), ("x", 1), (1, 0), (0, 1), (-1, -1), ("", "2 1")])
def test_a_malformed_quota_of_v1_is_none(cores_of, quota, period) -> None:
    assert cores_of(v1("cpu", quota, period), "4:cpu:/") == 16


def test_no_quota_goes_beyond_the_affinity(cores_of, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert cores_of({"cpu.max": "800000 100000"}, "0::/") == 1


def test_this_process() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


# --- threads ------------------------------------------------------------------------------------------------


NESTED = {"INFERENCE_NUM_THREADS": 6, "DEVICE_PROPERTIES": {"CPU": {"INFERENCE_NUM_THREADS": 2}}}


@pytest.mark.parametrize(
    ("setting", "ov_config", "omp", "torch_threads", "openvino_threads", "source"),
    [
        ("auto", {}, "", 4, 4, "handler.openvino.threads: auto: 8 cores / 2 workers"),
        ("auto", {}, " 3 ", 3, 3, "env OMP_NUM_THREADS: 3"),
        (5, {}, "3", 5, 5, "handler.openvino.threads: 5"),
        ("auto", {"INFERENCE_NUM_THREADS": 6}, "3", 6, 6, f"{THREADS}: 6"),
        (5, {"INFERENCE_NUM_THREADS": "6"}, "", 5, 6, f"{THREADS}: 6"),
        ("auto", {"INFERENCE_NUM_THREADS": 0}, "", 8, 8, f"{THREADS}: 0 (all cores)"),
        ("auto", NESTED, "", 2, 2, f"{CONFIG}.DEVICE_PROPERTIES.CPU.INFERENCE_NUM_THREADS: 2"),
    ],
)
def test_explicit_numbers_win(setting, ov_config, omp, torch_threads, openvino_threads, source) -> None:
    made = plan(setting, workers=2, ov_config=ov_config, env={"OMP_NUM_THREADS": omp})
    assert (made.torch_threads, made.openvino_threads) == (torch_threads, openvino_threads)
    assert made.sources["openvino_threads"] == source
    stated = "INFERENCE_NUM_THREADS" in ov_config
    share = {} if stated else {"INFERENCE_NUM_THREADS": openvino_threads}
    assert made.ov_config() == {**share, "ENABLE_CPU_PINNING": False}
    assert setting == "auto" or made.sources["torch_threads"] == f"handler.openvino.threads: {setting}"


@pytest.mark.parametrize("value", ["", "0", "-2", "4,2", "many", "2.5"])
def test_an_environment_that_names_no_number(value) -> None:
    assert plan(env={"OMP_NUM_THREADS": value}).torch_threads == 8


@given(cores=counts, workers=st.integers(-1, 80), throughput=st.booleans())
def test_workers_share_the_cores(cores: int, workers: int, throughput: bool) -> None:
    made = plan(workers=workers, cores=cores, throughput=throughput)
    threads = made.openvino_threads
    assert threads == made.torch_threads == made.ov_config()["INFERENCE_NUM_THREADS"] >= 1
    assert threads == 1 or threads * made.workers <= cores
    assert 1 <= made.streams <= (threads if throughput else 1)
    assert made.ov_config().get("NUM_STREAMS", 1) == made.streams


def test_cores_are_looked_up_when_none_are_given(monkeypatch) -> None:
    from torchserve_openvino.serving import threads

    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    assert plan(cores=None, workers=2).torch_threads == 3


# --- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "streams"), [(1, 1), (2, 2), (4, 4), (5, 2), (8, 2), (12, 3), (32, 8)])
def test_streams_by_themselves(threads: int, streams: int) -> None:
    assert plan(threads, throughput=True).streams == streams
    assert plan(threads).streams == 1


@pytest.mark.parametrize(
    ("streams", "ov_config", "expected", "added", "source"),
    [
        (3, {}, 3, 3, f"{STREAMS}: 3"),
        (3, {"NUM_STREAMS": "AUTO"}, 3, None, f"{STREAMS}: 3"),
        ("auto", {"NUM_STREAMS": 4}, 4, None, f"{NUM_STREAMS}: 4"),
        (3, {"NUM_STREAMS": "4"}, 4, None, f"{NUM_STREAMS}: 4 (before {STREAMS}: 3)"),
        ("auto", {}, 2, 2, f"{STREAMS}: auto: 2 for 8 threads"),
        ("auto", {"NUM_STREAMS": "NUMA"}, 2, None, f"{STREAMS}: auto: 2 for 8 threads"),
    ],
)
def test_streams_of_throughput(streams, ov_config, expected, added, source) -> None:
    made = plan(throughput=True, streams=streams, ov_config=ov_config)
    assert (made.streams, made.ov_config().get("NUM_STREAMS"), made.sources["streams"]) == (expected, added, source)


def test_latency_has_one_stream_unless_openvinos_config_says_otherwise() -> None:
    assert plan(streams=1).ov_config() == {"INFERENCE_NUM_THREADS": 8}
    assert plan().sources["streams"] == "handler.openvino.execution.mode: latency"
    assert plan(ov_config={"NUM_STREAMS": 2}).streams == 2
    assert plan(ov_config={"NUM_STREAMS": 0}).streams == 1


BOTH = {"NUM_STREAMS": 4, "INFERENCE_NUM_THREADS": 2}
OMP = {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("throughput", "changes", "key", "words"),
    [
        (True, {"setting": 2, "streams": 3}, STREAMS, "3 streams|2 threads|handler.openvino.threads to at least 3"),
        (True, {"streams": 3, "workers": 8}, STREAMS, "1 thread |8 cores / 8 workers"),
        (True, {"streams": 4, "env": OMP}, STREAMS, "OMP_NUM_THREADS to at least 4"),
        (True, {"ov_config": {"NUM_STREAMS": 1}}, NUM_STREAMS, f"is 1|Remove {NUM_STREAMS}|{MODE}: latency"),
        (True, {"streams": 1, "ov_config": {"NUM_STREAMS": 4}}, STREAMS, "to 2 or more"),
        (True, {"device": "GPU", "streams": 1}, STREAMS, "needs at least 2 streams"),
        (False, {"ov_config": BOTH}, NUM_STREAMS, f"{THREADS} to at least 4|{NUM_STREAMS} to at most 2"),
        (False, {"streams": 2}, STREAMS, f"Set {MODE}: throughput|remove {STREAMS}"),
    ],
)
def test_contradictions(throughput, changes, key, words) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(throughput=throughput, **changes)
    assert caught.value.key == key
    for word in words.split("|"):
        assert word in str(caught.value)


@given(threads=counts, streams=st.integers(2, 64))
def test_streams_never_exceed_the_threads(threads: int, streams: int) -> None:
    if streams > threads:
        with pytest.raises(ConfigError):
            plan(threads, throughput=True, streams=streams)
    else:
        assert plan(threads, throughput=True, streams=streams).streams == streams


@pytest.mark.parametrize("device", ["GPU", "GPU.1", "NPU", "AUTO", "AUTO:GPU,CPU", "HETERO:GPU,CPU"])
def test_other_devices_get_no_cpu_properties(device) -> None:
    made = plan(device=device, throughput=True, streams="auto", workers=2)
    assert (made.torch_threads, made.openvino_threads, made.streams, made.ov_config()) == (4, None, 1, {})
    # The CPU's threads do not limit a GPU's streams.
    assert plan(2, device=device, throughput=True, ov_config={"NUM_STREAMS": 4}).streams == 4
    assert plan(2, device=device, throughput=True, streams=4).ov_config() == {}


@pytest.mark.skipif(usable_cores() < 2, reason="one core has no two streams")
def test_openvino_takes_the_plan_as_it_is() -> None:
    made = plan(cores=2, throughput=True)
    parameter = ops.parameter([1, 8], np.float32)
    model = openvino.Model([ops.relu(parameter)], [parameter], "tiny")
    compiled = openvino.Core().compile_model(model, "CPU", made.ov_config())
    assert compiled.get_property("INFERENCE_NUM_THREADS") == made.openvino_threads == 2
    assert compiled.get_property("NUM_STREAMS") == made.streams == 2


# --- applying -----------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch):
    """Empties the thread variables; restores them afterwards."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def variables():
    return os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]


def test_apply(clean) -> None:
    plan(3).apply()
    assert (torch.get_num_threads(), variables()) == (3, ("3", "3"))


def test_the_users_environment_gives_way_to_an_explicit_setting_only(clean) -> None:
    # No other test may make `apply` write 7: it would not count as the user's then.
    clean.setenv("OMP_NUM_THREADS", "7")
    plan(env=None).apply()
    assert (torch.get_num_threads(), variables()) == (7, ("7", "7"))
    plan(ov_config={"INFERENCE_NUM_THREADS": 4}).apply()
    assert (torch.get_num_threads(), variables()) == (4, ("7", "4"))
    plan(3).apply()
    assert (torch.get_num_threads(), variables()) == (3, ("3", "3"))


def test_what_apply_wrote_is_not_taken_for_the_users(clean) -> None:
    plan(workers=4, env=None).apply()
    assert variables() == ("2", "2")
    again = plan(workers=2, env=None)
    assert again.sources["torch_threads"] == "handler.openvino.threads: auto: 8 cores / 2 workers"
    again.apply()
    assert variables() == ("4", "4")


def test_several_workers_are_not_pinned_to_the_same_cores() -> None:
    assert "ENABLE_CPU_PINNING" not in plan(workers=1).ov_config()
    assert plan(workers=2).ov_config()["ENABLE_CPU_PINNING"] is False
    assert "ENABLE_CPU_PINNING" not in plan(workers=2, ov_config={"ENABLE_CPU_PINNING": True}).ov_config()


def test_the_plan_as_json() -> None:
    made = plan(workers=2, throughput=True).to_dict()
    assert json.loads(json.dumps(made)) == made
    names = ("cores", "workers", "torch_threads", "openvino_threads", "streams")
    assert [made[name] for name in names] == [8, 2, 4, 4, 4]
    assert made["ov_config"] == {"INFERENCE_NUM_THREADS": 4, "NUM_STREAMS": 4, "ENABLE_CPU_PINNING": False}
    assert set(made["sources"]) == {"torch_threads", "openvino_threads", "streams"}
