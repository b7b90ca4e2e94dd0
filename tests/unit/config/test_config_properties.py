import numpy as np
import openvino
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from openvino import opset13 as ops

from torchserve_openvino.config import ConfigErrors, resolve_options
from torchserve_openvino.errors import ConfigError


def resolve(config=None, device="CPU", **kwargs):
    return resolve_options({"device": device, "config": config or {}}, env={}, **kwargs)


@pytest.fixture(scope="module")
def model():
    parameter = ops.parameter([1, 8], np.float32)
    weight = ops.constant(np.ones((8, 8), np.float32))
    return openvino.Model([ops.relu(ops.matmul(parameter, weight, False, False))], [parameter], "tiny")


def member_properties(compiled, device):
    return compiled.get_property("DEVICE_PROPERTIES")["CPU"] if ":" in device or device == "AUTO" else None


@pytest.mark.parametrize("device", ["CPU", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_the_default_is_f32_on_every_device_and_reaches_the_cpu(device, model):
    resolved = resolve(device=device)
    config = resolved.options.ov_config()
    assert config == {"INFERENCE_PRECISION_HINT": "f32"}
    assert resolved.sources["config.INFERENCE_PRECISION_HINT"] == "default"
    # ACCURACY alone leaves the precision at "dynamic", so f32 shows that the hint reached the CPU.
    compiled = openvino.Core().compile_model(model, device, config | {"EXECUTION_MODE_HINT": "ACCURACY"})
    properties = member_properties(compiled, device)
    precision = (
        properties["INFERENCE_PRECISION_HINT"] if properties else compiled.get_property("INFERENCE_PRECISION_HINT")
    )
    assert precision == openvino.Type.f32


@pytest.mark.parametrize("stated", [{"EXECUTION_MODE_HINT": "ACCURACY"}, {"INFERENCE_PRECISION_HINT": "bf16"}])
def test_a_stated_precision_stays(stated):
    resolved = resolve(stated)
    assert resolved.options.ov_config() == stated
    assert resolved.sources[f"config.{next(iter(stated))}"] == "options"


def test_an_npu_gets_no_f32(many_devices):
    assert resolve(device="NPU", catalog=many_devices).options.ov_config() == {}
    mixed = resolve(device="HETERO:NPU,GPU,CPU", catalog=many_devices)
    nested = {"GPU": {"INFERENCE_PRECISION_HINT": "f32"}, "CPU": {"INFERENCE_PRECISION_HINT": "f32"}}
    assert mixed.options.ov_config() == {"DEVICE_PROPERTIES": nested}
    assert mixed.sources["config.DEVICE_PROPERTIES"] == "default"


def test_a_precision_for_one_member_leaves_f32_for_the_others(many_devices):
    config = {"DEVICE_PROPERTIES": {"GPU": {"INFERENCE_PRECISION_HINT": "f16"}}}
    merged = resolve(config, device="AUTO:GPU,CPU", catalog=many_devices).options.ov_config()
    assert merged["DEVICE_PROPERTIES"] == {
        "GPU": {"INFERENCE_PRECISION_HINT": "f16"},
        "CPU": {"INFERENCE_PRECISION_HINT": "f32"},
    }


@pytest.mark.parametrize("device", ["CPU", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_values_from_yaml_are_taken_by_compile_model(device, model):
    config = {
        "PERFORMANCE_HINT": "latency",
        "INFERENCE_PRECISION_HINT": "float32",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": 1.0,
        "ENABLE_HYPER_THREADING": 1,
        "ENABLE_CPU_PINNING": "yes",
        "PERF_COUNT": False,
        "SCHEDULING_CORE_TYPE": "any_core",
        "CACHE_MODE": "OPTIMIZE_SIZE",
        "ENABLE_MMAP": "true",
    }
    checked = resolve(config, device=device).options.ov_config()
    assert checked["PERFORMANCE_HINT"] == "LATENCY"
    assert checked["INFERENCE_PRECISION_HINT"] == "f32"
    assert checked["INFERENCE_NUM_THREADS"] == 1
    assert checked["ENABLE_HYPER_THREADING"] is True
    request = openvino.Core().compile_model(model, device, checked).create_infer_request()
    assert request.infer([np.ones((1, 8), np.float32)])[0].shape == (1, 8)


def test_openvinos_own_constants():
    hints, streams = openvino.properties.hint, openvino.properties.streams
    checked = resolve(
        {
            hints.performance_mode: hints.PerformanceMode.THROUGHPUT,
            "INFERENCE_PRECISION_HINT": openvino.Type.bf16,
            str(streams.num): 2,
        }
    ).options.config
    assert checked == {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "bf16", "NUM_STREAMS": 2}


@pytest.mark.parametrize("device", ["CPU", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("PERFORMANCE_HNT", "PERFORMANCE_HINT"),
        ("performance_hint", "PERFORMANCE_HINT"),
        ("NUM_STREAM", "NUM_STREAMS"),
        ("INFERENCE_PRECISION", "INFERENCE_PRECISION_HINT"),
        ("CACHEDIR", "CACHE_DIR"),
        ("QQQ", None),
    ],
)
def test_an_unknown_property_is_refused(device, name, suggestion):
    with pytest.raises(ConfigError, match="is not an OpenVINO property") as caught:
        resolve({name: 1}, device=device)
    assert (caught.value.key, caught.value.suggestion) == (f"config.{name}", suggestion)


def test_a_read_only_property():
    with pytest.raises(ConfigError, match="read-only on CPU"):
        resolve({"FULL_DEVICE_NAME": "x"})


@pytest.mark.parametrize(
    "config",
    [
        {"PERFORMANCE_HINT": "LATENCCY"},
        {"PERFORMANCE_HINT": "UNDEFINED"},
        {"INFERENCE_PRECISION_HINT": "f31"},
        {"EXECUTION_MODE_HINT": "FAST"},
        {"INFERENCE_NUM_THREADS": "x"},
        {"INFERENCE_NUM_THREADS": -1},
        {"INFERENCE_NUM_THREADS": 1.5},
        {"INFERENCE_NUM_THREADS": True},
        {"NUM_STREAMS": -5},
        {"NUM_STREAMS": 2.5},
        {"NUM_STREAMS": True},
        {"NUM_STREAMS": "3x"},
        {"NUM_STREAMS": "2.5"},
        {"NUM_STREAMS": "--2"},
        {"ENABLE_CPU_PINNING": "maybe"},
        {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": 3},
        {"KV_CACHE_PRECISION": "x"},
        {"LOG_LEVEL": "x"},
        {"NUM_STREAMS": None},
        {"NUM_STREAMS": [1]},
        {"CACHE_MODE": "zzz"},
        {"DEVICE_PROPERTIES": 3},
        {"DEVICE_PROPERTIES": {"GPU": {"NUM_STREAMS": 1}}},
        {"DEVICE_PROPERTIES": {"CPU": 3}},
        {"DEVICE_PROPERTIES": {"CPU": {"NUM_STREAMZ": 3}}},
    ],
)
def test_a_value_that_openvino_would_refuse_is_refused_here(config):
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert caught.value.key.startswith(f"config.{next(iter(config))}")


def test_values_are_checked_on_the_members_of_a_virtual_device():
    with pytest.raises(ConfigError, match="CPU refuses -1"):
        resolve({"INFERENCE_NUM_THREADS": -1}, device="AUTO:CPU")
    with pytest.raises(ConfigError, match="AUTO:CPU"):
        resolve({"COMPILATION_NUM_THREADS": 2}, device="AUTO:CPU")


@pytest.mark.parametrize(
    ("value", "canonical"), [("auto", "AUTO"), ("NUMA", "NUMA"), ("2", 2), (2.0, 2), (0, 0), ("0", 0)]
)
def test_numbers_of_streams(value, canonical, model):
    checked = resolve({"NUM_STREAMS": value}).options.ov_config()
    assert checked["NUM_STREAMS"] == canonical
    openvino.Core().compile_model(model, "CPU", checked)


@pytest.mark.parametrize(("value", "word"), [(-1, "AUTO"), ("-2", "NUMA")])
def test_openvinos_constants_for_streams_are_written_as_words(value, word):
    with pytest.raises(ConfigError, match="must not be negative") as caught:
        resolve({"NUM_STREAMS": value})
    assert (caught.value.key, caught.value.suggestion) == ("config.NUM_STREAMS", word)


@given(st.sampled_from(["NUM_STREAMS", "INFERENCE_NUM_THREADS"]), st.integers(max_value=-1))
def test_a_negative_number_is_refused_without_the_device_as_well(name, value):
    with pytest.raises(ConfigError, match="must not be negative"):
        resolve({name: value}, check_device=False)


def test_documented_names_for_a_device_that_is_absent(many_devices):
    for device, catalog, check in (("GPU", many_devices, True), ("GPU", None, False)):
        ok = resolve({"NUM_STREAMS": 2, "GPU_SOMETHING_NEW": 1}, device, catalog=catalog, check_device=check)
        assert ok.options.config == {"NUM_STREAMS": 2, "GPU_SOMETHING_NEW": 1}
        with pytest.raises(ConfigError) as caught:
            resolve({"NUM_STREAMZ": 2}, device, catalog=catalog, check_device=check)
        assert caught.value.suggestion == "NUM_STREAMS"


def settable_cpu_properties():
    access = openvino.Core().get_property("CPU", "SUPPORTED_PROPERTIES")
    return sorted(name for name, mode in access.items() if mode != "RO")


def test_the_number_of_kernels_kept_is_a_property_though_openvino_lists_it_nowhere():
    assert resolve({"CPU_RUNTIME_CACHE_CAPACITY": "100"}).options.config == {"CPU_RUNTIME_CACHE_CAPACITY": 100}
    with pytest.raises(ConfigError, match="must not be negative"):
        resolve({"CPU_RUNTIME_CACHE_CAPACITY": -1})


@given(st.sampled_from(settable_cpu_properties()), st.data())
def test_a_random_misspelling_is_refused_with_a_suggestion(name, data):
    index = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("QZX7"))
    misspelt = data.draw(
        st.sampled_from([name[:index] + name[index + 1 :], name[:index] + letter + name[index:], name.lower()])
    )
    assume(misspelt not in settable_cpu_properties())
    with pytest.raises(ConfigError) as caught:
        resolve({misspelt: 1})
    assert caught.value.suggestion is not None


# --- conflicting properties -------------------------------------------------------------------------------------

HINT, REQUESTS, MEMBERS = "PERFORMANCE_HINT", "PERFORMANCE_HINT_NUM_REQUESTS", "DEVICE_PROPERTIES"
STREAMS, THREADS = "NUM_STREAMS", "INFERENCE_NUM_THREADS"


@pytest.mark.parametrize(
    ("device", "config", "key", "words"),
    [
        ("CPU", {HINT: "latency", STREAMS: "2"}, STREAMS, f"{STREAMS}: 2|{HINT}: LATENCY|Remove {STREAMS}"),
        ("CPU", {STREAMS: 4, THREADS: 2}, STREAMS, f"{STREAMS}: 4|{THREADS}: 2|at most 2|at least 4"),
        ("CPU", {REQUESTS: 4}, REQUESTS, f"is 4|not stated|Set {HINT}: THROUGHPUT|remove {REQUESTS}"),
        ("HETERO:CPU", {REQUESTS: 4, HINT: "LATENCY"}, REQUESTS, f"{HINT} is LATENCY"),
        ("AUTO:CPU", {HINT: "LATENCY", MEMBERS: {"cpu": {STREAMS: 2}}}, f"{MEMBERS}.cpu.{STREAMS}", f"{HINT}: LATENCY"),
        ("AUTO:CPU", {STREAMS: 2, MEMBERS: {"CPU": {HINT: "LATENCY"}}}, f"{MEMBERS}.CPU.{HINT}", f"{STREAMS}: 2"),
        ("AUTO:CPU", {THREADS: 1, MEMBERS: {"CPU": {STREAMS: 2}}}, f"{MEMBERS}.CPU.{STREAMS}", f"{THREADS}: 1"),
        (
            "AUTO:CPU",
            {HINT: "THROUGHPUT", MEMBERS: {"CPU": {HINT: "LATENCY", REQUESTS: 2}}},
            f"{MEMBERS}.CPU.{REQUESTS}",
            f"{HINT} is LATENCY",
        ),
    ],
)
def test_contradictions(device, config, key, words):
    with pytest.raises(ConfigError) as caught:
        resolve(config, device=device)
    assert caught.value.key == f"config.{key}"
    for word in words.split("|"):
        assert word in caught.value.message


def test_every_contradiction_is_named_at_once():
    with pytest.raises(ConfigErrors) as caught:
        resolve({HINT: "LATENCY", STREAMS: 3, THREADS: 2, REQUESTS: 1})
    assert len(caught.value.problems) == 3


def test_a_misspelt_value_is_not_held_against_others():
    with pytest.raises(ConfigError) as caught:
        resolve({HINT: "THROUGPUT", REQUESTS: 2})
    assert (caught.value.key, caught.value.suggestion) == ("config.PERFORMANCE_HINT", "THROUGHPUT")


@pytest.mark.parametrize(
    ("device", "config"),
    [
        ("CPU", {HINT: "LATENCY", STREAMS: 1}),
        ("CPU", {HINT: "LATENCY", STREAMS: "AUTO"}),
        ("CPU", {HINT: "THROUGHPUT", STREAMS: 2, THREADS: 2}),
        ("CPU", {STREAMS: 2, THREADS: 0}),
        ("CPU", {HINT: "THROUGHPUT", REQUESTS: 2}),
        ("AUTO:CPU", {HINT: "CUMULATIVE_THROUGHPUT", REQUESTS: 2}),
        ("MULTI:CPU", {REQUESTS: 2}),
        ("AUTO:CPU", {HINT: "THROUGHPUT", MEMBERS: {"CPU": {REQUESTS: 2}}}),
        ("AUTO:CPU", {REQUESTS: 2, MEMBERS: {"CPU": {HINT: "THROUGHPUT"}}}),
        ("AUTO:CPU", {HINT: "LATENCY", MEMBERS: {"CPU": {HINT: "THROUGHPUT", STREAMS: 2}}}),
    ],
)
def test_what_goes_together(device, config, model):
    checked = resolve(config, device=device).options.ov_config()
    openvino.Core().compile_model(model, device, checked)


def test_the_cpus_threads_do_not_bound_a_gpus_streams(many_devices):
    config = {THREADS: 2, MEMBERS: {"GPU": {STREAMS: 4}}}
    resolve(config, device="AUTO:GPU,CPU", catalog=many_devices)
    config = {MEMBERS: {"GPU": {STREAMS: 4, HINT: "LATENCY"}}}
    with pytest.raises(ConfigError, match="contradicts PERFORMANCE_HINT: LATENCY"):
        resolve(config, device="AUTO:GPU,CPU", catalog=many_devices)


def test_one_device_in_two_spellings_is_an_error():
    nested = {"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}, "cpu": {"PERF_COUNT": True}}
    with pytest.raises(ConfigError, match=r"DEVICE_PROPERTIES\.cpu.*is there already"):
        resolve({"DEVICE_PROPERTIES": nested})
