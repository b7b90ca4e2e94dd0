import copy
import json
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchserve_openvino.config import ConfigErrors, load_serving_config
from torchserve_openvino.config.torchserve_keys import ALL
from torchserve_openvino.errors import ConfigError, DeviceNotFoundError

# A YAML with every main section.
CONTRACT = """\
minWorkers: 1
maxWorkers: 2
batchSize: 8
maxBatchDelay: 5
startupTimeout: 600
pt2:
  compile:
    enable: true
    backend: openvino
    dynamic: false
    options:                         # every option of OpenVINO's torch.compile page
      device: CPU                    # CPU, GPU.0, NPU, AUTO:GPU,CPU, HETERO:GPU,CPU, MULTI:...
      aot_autograd: true
      model_caching: true
      cache_dir: /var/cache/torchserve-openvino
      disabled_ops: [aten.relu.default]     # also torch.ops.aten.relu.default, aten::relu, aten.relu
      decompositions: [aten.addcdiv]
      config: {PERFORMANCE_HINT: LATENCY, INFERENCE_PRECISION_HINT: f32}
handler:
  openvino:
    warmup: {inputs: [{shape: [3, 224, 224], dtype: float32}], batch_sizes: auto}
    fallback: {allow: [unsupported_op, disabled_op], min_coverage: 0.9, on_violation: refuse}   # or warn
    verify: {against: eager, max_abs: 1.0e-3}
    batching: {mode: bucket, buckets: auto}
    threads: auto
"""
MODEL_CONFIGS = Path(__file__).parents[3] / "model-config"


def ours(section):
    return load_serving_config({"handler": {"openvino": section}}, env={}).openvino


def test_templates_leave_the_precision_to_a_measurement():
    stated = {
        path.stem: config.openvino.precision
        for path in MODEL_CONFIGS.glob("*.yaml")
        if path.stem != "metrics"
        for config in [load_serving_config(path, env={}, check_device=False)]
    }
    # An NPU's precision is fixed, generated text has `generate.weights`, and a trial in f32 on a GPU takes minutes.
    assert {name: each for name, each in stated.items() if each != "auto"} == {
        "gpu": "f16", "npu": "f32", "text-generation": "f32"
    }  # fmt: skip
    texts = "".join(path.read_text() for path in MODEL_CONFIGS.glob("*.yaml"))
    assert "INFERENCE_PRECISION_HINT: f32" not in texts


def test_the_contracts_example(write):
    path = write(CONTRACT)
    config = load_serving_config(path, env={})
    assert config.torchserve["batchSize"] == 8
    assert config.pt2.dynamic is False
    assert config.backend is not None
    assert config.backend.options.disabled_ops == ("aten.relu.default",)
    assert config.backend.options.ov_config() == {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    assert config.backend.options.cache_dir == "/var/cache/torchserve-openvino"
    section = config.openvino
    assert section.warmup.inputs[0].shape == [3, 224, 224]
    assert section.fallback.allow == ["unsupported_op", "disabled_op"]
    assert (section.fallback.min_coverage, section.fallback.on_violation) == (0.9, "refuse")
    assert section.verify.max_abs == 1.0e-3
    assert (section.batching.mode, section.batching.buckets, section.threads) == ("bucket", "auto", "auto")


def test_sources_are_lines_of_the_file_or_defaults(write):
    path = write(CONTRACT)
    rows = {row.key: row for row in load_serving_config(path, env={}).effective()}
    assert rows["batchSize"].source == f"{path}:3"
    assert rows["pt2.compile.options.device"].source == f"{path}:12"
    assert rows["pt2.compile.options.config.PERFORMANCE_HINT"].source == f"{path}:18"
    assert rows["handler.openvino.verify.max_abs"].source == f"{path}:23"
    assert rows["handler.openvino.verify.on_violation"].source == "default"
    assert rows["handler.openvino.image.crop"] == ("handler.openvino.image.crop", 224, "default")


def test_environment_against_yaml(write):
    env = {"OPENVINO_TORCH_BACKEND_DEVICE": "AUTO", "OPENVINO_TORCH_CACHE_DIR": "/tmp/from-env"}
    path = write("pt2:\n  compile:\n    options:\n      device: CPU\n")
    summary = load_serving_config(path, env=env).summary
    assert summary["pt2.compile.options.device"] == {"value": "CPU", "source": f"{path}:4"}
    assert summary["pt2.compile.options.cache_dir"]["source"] == "env OPENVINO_TORCH_CACHE_DIR"
    nothing = load_serving_config({}, env=env).summary
    assert nothing["pt2.options.device"] == {"value": "AUTO", "source": "env OPENVINO_TORCH_BACKEND_DEVICE"}


def test_the_string_form_has_its_line(write):
    path = write("pt2: openvino\n")
    summary = load_serving_config(path, env={}).summary
    assert summary["pt2.backend"] == {"value": "openvino", "source": f"{path}:1"}


def test_config_is_plain_data(write):
    config = load_serving_config(write(CONTRACT), env={})
    json.dumps(config.summary)
    # TorchServe's asynchronous mode copies everything attached to the context.
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.location = "x"


def test_a_mapping_is_never_changed():
    data = yaml.safe_load(CONTRACT)
    before = copy.deepcopy(data)
    config = load_serving_config(data, env={})
    config.pt2.options.clear()
    assert data == before


def test_the_users_own_keys_under_handler_are_kept():
    config = load_serving_config({"handler": {"profile": True, "openvino": {}, "my": {"a": 1}}}, env={})
    assert config.handler == {"profile": True, "my": {"a": 1}}


@pytest.mark.parametrize("data", [{"handler": None}, {"handler": {"openvino": None}}, {"pt2": None}, {}])
def test_empty_sections(data):
    assert load_serving_config(data, env={}).openvino.threads == "auto"


def test_all_problems_at_once_each_with_its_line(write):
    path = write(
        "batchsize: 8\n"
        "pt2:\n"
        "  compile:\n"
        "    options:\n"
        "      device: GPU\n"
        "      config: {PERFORMANCE_HNT: LATENCY}\n"
        "handler:\n"
        "  openvino:\n"
        "    verify: {max_abs: -1}\n"
        "    warmup:\n"
        "      inputs:\n"
        "        - shape: [3, 0]\n"
        "          dtpye: int64\n"
    )
    with pytest.raises(ConfigErrors) as caught:
        load_serving_config(path, env={})
    found = {problem.key: (problem.location, problem.suggestion) for problem in caught.value.problems}
    assert found == {
        "batchsize": (f"{path}:1", "batchSize"),
        "pt2.compile.options.device": (f"{path}:5", "CPU"),
        "pt2.compile.options.config.PERFORMANCE_HNT": (f"{path}:6", "PERFORMANCE_HINT"),
        "handler.openvino.verify.max_abs": (f"{path}:9", None),
        "handler.openvino.warmup.inputs[0].shape[1]": (f"{path}:12", None),
        "handler.openvino.warmup.inputs[0].dtpye": (f"{path}:13", "dtype"),
    }
    for location, _ in found.values():
        assert location in str(caught.value)


def test_a_single_problem_keeps_its_class(write):
    with pytest.raises(DeviceNotFoundError) as caught:
        load_serving_config(write("pt2: {backend: openvino, options: {device: NPU}}\n"), env={})
    assert caught.value.key == "pt2.options.device"


@pytest.mark.parametrize(
    ("section", "key", "suggestion"),
    [
        ({"wramup": {}}, "wramup", "warmup"),
        ([], "", None),
        ({"warmup": []}, "warmup", None),
        ({"warmup": {"inputs": {"shape": [3]}}}, "warmup.inputs", None),
        ({"warmup": {"inputs": [{"dtype": "float32"}]}}, "warmup.inputs[0].shape", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "flot32"}]}}, "warmup.inputs[0].dtype", "float32"),
        ({"warmup": {"inputs": [{"shape": [True]}]}}, "warmup.inputs[0].shape[0]", None),
        ({"warmup": {"inputs": [{"shape": ["3"]}]}}, "warmup.inputs[0].shape[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "low": 2, "high": 1}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "low": "x"}]}}, "warmup.inputs[0].low", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "complex64", "low": 0}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "bool", "high": 1}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "int64", "low": 0.2, "high": 0.8}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "int64", "high": -5}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "int8", "high": 300}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "int32", "low": 3.0e9}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "float16", "high": 1.0e6}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"inputs": [{"shape": [3], "dtype": "uint8", "low": -5, "high": 5}]}}, "warmup.inputs[0]", None),
        ({"warmup": {"batch_sizes": "atuo"}}, "warmup.batch_sizes", "auto"),
        ({"warmup": {"batch_sizes": [0]}}, "warmup.batch_sizes", None),
        ({"warmup": {"batch_sizes": []}}, "warmup.batch_sizes", None),
        ({"fallback": {"allow": ["unsuported_op"]}}, "fallback.allow", "unsupported_op"),
        ({"fallback": {"min_coverage": 1.5}}, "fallback.min_coverage", None),
        ({"fallback": {"min_coverage": True}}, "fallback.min_coverage", None),
        ({"fallback": {"on_violation": "refuze"}}, "fallback.on_violation", "refuse"),
        ({"fallback": {"to": "egar"}}, "fallback.to", "eager"),
        ({"verify": {"against": "eagre"}}, "verify.against", "eager"),
        ({"verify": {"max_abs": ".nan"}}, "verify.max_abs", None),
        ({"verify": {"max_abs": float("inf")}}, "verify.max_abs", None),
        ({"verify": {"shadow": 1.5}}, "verify.shadow", None),
        ({"verify": {"shadow": True}}, "verify.shadow", None),
        ({"verify": {"shadow_budget": 0}}, "verify.shadow_budget", None),
        ({"verify": {"on_shadow_mismatch": "refuze"}}, "verify.on_shadow_mismatch", "refuse"),
        ({"verify": {"keep_mismatches": "below/the/worker"}}, "verify.keep_mismatches", None),
        ({"verify": {"keep_mismatches": True}}, "verify.keep_mismatches", None),
        ({"verify": {"shado": 0.1}}, "verify.shado", "shadow"),
        ({"batching": {"mode": "buckets"}}, "batching.mode", "bucket"),
        ({"batching": {"buckets": [1, "2"]}}, "batching.buckets", None),
        ({"threads": 0}, "threads", None),
        ({"threads": True}, "threads", None),
        ({"threads": "atuo"}, "threads", "auto"),
        ({"image": {"mean": [1, 2]}}, "image.mean[2]", None),
        ({"image": {"std": [1, 0, 1]}}, "image.std[1]", None),
        ({"image": {"interpolation": "bilinaer"}}, "image.interpolation", "bilinear"),
        ({"image": {"top_k": 0}}, "image.top_k", None),
        ({"tensor": {"concatenate": "yes"}}, "tensor.concatenate", None),
    ],
)
def test_mistakes_in_our_section(section, key, suggestion):
    with pytest.raises(ConfigError) as caught:
        ours(section)
    assert caught.value.key == f"handler.openvino.{key}".rstrip(".")
    assert caught.value.suggestion == suggestion


def test_yaml_traps(write):
    text = "handler: {openvino: {verify: {against: off, max_abs: 1e-3}, batching: {buckets: [8, 2, 8]}}}\n"
    section = load_serving_config(write(text), env={}).openvino
    assert section.verify.against == "off"
    assert section.verify.max_abs == 1e-3
    assert section.batching.buckets == [2, 8]


def test_shadow():
    section = ours({"verify": {"shadow": 0.001, "keep_mismatches": "/var/kept", "on_shadow_mismatch": "refuse"}}).verify
    assert (section.shadow, section.keep_mismatches, section.on_shadow_mismatch) == (0.001, "/var/kept", "refuse")
    default = ours({}).verify
    assert (default.shadow, default.keep_mismatches, default.on_shadow_mismatch) == (0.0, None, "warn")
    with pytest.raises(ConfigError, match="verify.shadow: 0, or release_weights: false"):
        ours({"release_weights": True, "verify": {"shadow": 0.1}})
    assert ours({"release_weights": True, "verify": {"shadow": 0}}).release_weights


def test_shorthands():
    section = ours({"fallback": {"allow": "graph_break"}, "warmup": {"batch_sizes": 4}, "threads": 3})
    assert (section.fallback.allow, section.warmup.batch_sizes, section.threads) == (["graph_break"], [4], 3)
    assert ours({"fallback": {"allow": "all"}}).fallback.allow == "all"
    assert ours({"warmup": {"inputs": [{"shape": [3], "dtype": "torch.int64"}]}}).warmup.inputs[0].dtype == "int64"


@pytest.mark.parametrize(
    ("data", "key", "suggestion"),
    [
        ({"openvino": {}}, "openvino", "handler.openvino"),
        ({"handler": {"openvno": {}}}, "handler.openvno", "openvino"),
        ({"handler": []}, "handler", None),
        ({"pt3": "openvino"}, "pt3", "pt2"),
        ({"batch_size": 3}, "batch_size", "batchSize"),
        ({"my_setting": 3}, "my_setting", None),
        ({"batchSize": 0}, "batchSize", None),
        ({"batchSize": "8"}, "batchSize", None),
        ({"batchSize": True}, "batchSize", None),
        ({"minWorkers": 3, "maxWorkers": 2}, "maxWorkers", None),
        ({"useJobTicket": "true"}, "useJobTicket", None),
        ({"deviceType": "gpv"}, "deviceType", "gpu"),
        ({"deviceIds": [0, "1"]}, "deviceIds", None),
        ({"torchrun": {"nproc_per_node": 2}}, "torchrun.nproc_per_node", "nproc-per-node"),
        ({3: 4}, "3", None),
    ],
)
def test_mistakes_at_the_top(data, key, suggestion):
    with pytest.raises(ConfigError) as caught:
        load_serving_config(data, env={})
    assert (caught.value.key, caught.value.suggestion) == (key, suggestion)


@settings(deadline=None)
@given(st.sampled_from(sorted(ALL - {"tp", "rpc"})), st.integers(0, 30), st.sampled_from("qZ_"))
def test_a_misspelt_top_level_key_is_refused(name, index, letter):
    misspelt = name[:index] + letter + name[index:]
    with pytest.raises(ConfigError) as caught:
        load_serving_config({misspelt: 1}, env={})
    assert caught.value.key == misspelt
    assert caught.value.suggestion in ALL


def test_fallback_to_in_either_place():
    config = load_serving_config(
        {"handler": {"openvino": {"fallback": {"to": "inductor"}}}}, env={}, location="net.yaml"
    )
    assert config.backend is not None
    assert config.backend.options.fallback_to == "inductor"
    assert config.backend.sources["fallback_to"] == "net.yaml"
    both = {
        "pt2": {"backend": "openvino", "options": {"fallback_to": "eager"}},
        "handler": {"openvino": {"fallback": {"to": "inductor"}}},
    }
    with pytest.raises(ConfigError, match="set only one of them"):
        load_serving_config(both, env={})
    both["handler"]["openvino"]["fallback"]["to"] = "eager"  # type: ignore[index]
    load_serving_config(both, env={})


@pytest.mark.parametrize(
    "name",
    [
        "cpu-latency",
        "cpu-throughput",
        "cpu-text",
        "auto",
        "strict",
        "text",
        "vision",
        "audio",
        "text-generation",
        "image-generation",
    ],
)
def test_shipped_configurations_on_this_machine(name):
    path = MODEL_CONFIGS / f"{name}.yaml"
    config = load_serving_config(path, env={})
    assert config.pt2.enabled
    assert config.backend is not None
    assert config.backend.options.ov_config()["INFERENCE_PRECISION_HINT"] == "f32"


@pytest.mark.parametrize(("name", "device"), [("gpu", "GPU"), ("npu", "NPU")])
def test_shipped_configurations_for_other_devices(name, device, many_devices):
    path = MODEL_CONFIGS / f"{name}.yaml"
    for kwargs in ({"catalog": many_devices}, {"check_device": False}):
        config = load_serving_config(path, env={}, **kwargs)
        assert config.backend is not None
        assert config.backend.options.device == device
    with pytest.raises(DeviceNotFoundError, match="available: CPU"):
        load_serving_config(path, env={})


def test_the_strict_one_refuses_every_fallback():
    section = load_serving_config(MODEL_CONFIGS / "strict.yaml", env={}).openvino
    assert (section.fallback.allow, section.fallback.min_coverage) == ([], 1.0)
    assert (section.fallback.on_violation, section.verify.on_violation) == ("refuse", "refuse")
    assert (section.verify.shadow, section.verify.on_shadow_mismatch) == (0.001, "refuse")
    assert load_serving_config(MODEL_CONFIGS / "strict.yaml", env={}).pt2.fullgraph


def test_every_shipped_configuration_is_tested():
    names = {path.stem for path in MODEL_CONFIGS.glob("*.yaml")} - {"metrics"}
    assert names == {
        "cpu-latency",
        "cpu-throughput",
        "cpu-text",
        "text-generation",
        "image-generation",
        "gpu",
        "npu",
        "auto",
        "strict",
        "text",
        "vision",
        "audio",
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"freeze": "maybe"}, r"handler.openvino.freeze: must be auto, true or false, not 'maybe'"),
        ({"batching": {"buckets": [4, 10**9]}}, r"buckets: contains 1000000000; the maximum batch size is 65536"),
        ({"warmup": {"batch_sizes": [70_000]}}, r"batch_sizes: contains 70000; the maximum"),
        ({"threads": 1_000_000_000}, r"threads: is 1000000000; the maximum is 1024"),
        ({"execution": {"mode": "throughput", "streams": 5000}}, r"streams: is 5000"),
    ],
)
def test_slips_of_the_pen_are_named_before_a_worker_crashes(section, message):
    with pytest.raises(ConfigError, match=message) as raised:
        ours(section)
    assert "function-" not in str(raised.value) and "literal[" not in str(raised.value)


@pytest.mark.parametrize(("word", "on"), [("yes", True), ("off", False), (1, True), ("false", False)])
def test_words_mean_the_same_for_enable_and_for_options(word, on):
    given = {"pt2": {"compile": {"enable": word, "backend": "openvino", "options": {"model_caching": word}}}}
    config = load_serving_config(given, env={})
    assert config.pt2.enabled is on
    if config.backend is not None:
        assert config.backend.options.model_caching is on


@pytest.mark.parametrize("key", ["shadow_budget: 0.1", "on_shadow_mismatch: refuse", "keep_mismatches: /var/kept"])
def test_settings_of_a_shadow_that_is_off_have_no_effect_and_are_refused(key: str) -> None:
    name, _, value = key.partition(": ")
    with pytest.raises(ConfigError, match=f"{name} has no effect without shadow"):
        ours({"verify": {name: float(value) if value == "0.1" else value}})
    ours({"verify": {name: float(value) if value == "0.1" else value, "shadow": 0.0}})


def test_lengths_are_no_batch_sizes() -> None:
    assert ours({"text": {"lengths": [100_000, 16]}}).text.lengths == [16, 100_000]
    with pytest.raises(ConfigError, match="the maximum batch size is 65536"):
        ours({"batching": {"buckets": [100_000]}})
