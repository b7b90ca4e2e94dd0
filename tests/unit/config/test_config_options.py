import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.config import BackendOptions, ConfigErrors, resolve_options
from torchserve_openvino.config.options import OPTION_NAMES
from torchserve_openvino.errors import ConfigError, DeviceNotFoundError

ENV = {
    "OPENVINO_TORCH_BACKEND_DEVICE": "auto",
    "OPENVINO_TORCH_MODEL_CACHING": "1",
    "OPENVINO_TORCH_CACHE_DIR": "/tmp/from-env",
}


def test_defaults():
    for nothing in (None, {}):
        resolved = resolve_options(nothing, env={})
        assert resolved.options == BackendOptions()
        assert set(resolved.sources.values()) == {"default"}


def test_environment_gives_defaults_and_says_so():
    resolved = resolve_options({}, env=ENV)
    assert resolved.options.device == "AUTO"
    assert resolved.options.model_caching is True
    assert resolved.options.cache_dir == "/tmp/from-env"
    assert resolved.sources["device"] == "env OPENVINO_TORCH_BACKEND_DEVICE"
    assert resolved.sources["cache_dir"] == "env OPENVINO_TORCH_CACHE_DIR"
    assert "CACHE_DIR" not in resolved.options.ov_config()


def test_options_win_over_the_environment():
    resolved = resolve_options({"device": "CPU", "model_caching": False, "cache_dir": "/tmp/own"}, env=ENV)
    assert (resolved.options.device, resolved.options.model_caching) == ("CPU", False)
    assert resolved.options.cache_dir == "/tmp/own"
    assert {resolved.sources[name] for name in ("device", "model_caching", "cache_dir")} == {"options"}


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "true")
    assert resolve_options({}).options.model_caching is True


def test_a_wrong_environment_variable_is_named():
    with pytest.raises(DeviceNotFoundError) as caught:
        resolve_options({}, env={"OPENVINO_TORCH_BACKEND_DEVICE": "GPU"})
    assert (caught.value.location, caught.value.key) == ("environment", "OPENVINO_TORCH_BACKEND_DEVICE")
    with pytest.raises(ConfigError, match="OPENVINO_TORCH_MODEL_CACHING: must be true or false"):
        resolve_options({}, env={"OPENVINO_TORCH_MODEL_CACHING": "perhaps"})
    assert resolve_options({}, env={"OPENVINO_TORCH_BACKEND_DEVICE": " "}).options.device == "CPU"


@pytest.mark.parametrize("value", [False, 0, "0", "false", "False"])
def test_flags_that_say_no(value):
    options = resolve_options({"aot_autograd": value, "model_caching": value, "testing": value}, env={}).options
    assert (options.aot_autograd, options.model_caching, options.testing) == (False, False, False)


@pytest.mark.parametrize("value", [True, 1, "1", "true", "True"])
def test_flags_that_say_yes(value):
    assert resolve_options({"testing": value}, env={}).options.testing is True


def test_cache_folders(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    root = f"{tmp_path}/torchserve-openvino"
    assert resolve_options({"model_caching": True}, env=env).options.cache_dir == root
    assert resolve_options({"cache_dir": "nets/a"}, env=env).options.cache_dir == f"{root}/nets/a"
    assert resolve_options({"cache_dir": "../b"}, env=env).options.cache_dir == f"{tmp_path}/b"
    home = str(Path("~/x").expanduser())
    assert resolve_options({"cache_dir": "~/x"}, env=env).options.cache_dir == home
    assert resolve_options({"cache_dir": Path("/a/b")}, env=env).options.cache_dir == "/a/b"
    assert resolve_options({"cache_dir": "/a/b"}, env=env).options.ov_config().get("CACHE_DIR") is None
    relative_xdg = resolve_options({"model_caching": True}, env={"XDG_CACHE_HOME": "rel"}).options.cache_dir
    assert relative_xdg == str(Path("~/.cache/torchserve-openvino").expanduser())


def test_openvinos_own_cache_is_used_where_it_is_asked_for(tmp_path):
    given_options = {"model_caching": True, "cache_dir": "/a", "config": {"CACHE_DIR": "b"}}
    options = resolve_options(given_options, env={"XDG_CACHE_HOME": str(tmp_path)}).options
    assert options.ov_config()["CACHE_DIR"] == f"{tmp_path}/torchserve-openvino/b"


@pytest.mark.parametrize("value", [3, "", [], ["a"]])
def test_what_is_no_folder(value):
    with pytest.raises(ConfigError, match="cache_dir"):
        resolve_options({"cache_dir": value}, env={})


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        resolve_options({"cache_dir": str(file)}, env={})


def test_problems_come_together_and_keep_their_classes():
    with pytest.raises(ConfigErrors) as caught:
        resolve_options({"device": "GPU", "disabled_op": [], "fallback_to": "inductr", "config": 3}, env={})
    kinds = {type(problem).__name__: problem for problem in caught.value.problems}
    assert len(caught.value.problems) == 4
    assert "DeviceNotFoundError" in kinds
    suggestions = {problem.key: problem.suggestion for problem in caught.value.problems}
    assert suggestions["disabled_op"] == "disabled_ops"
    assert suggestions["fallback_to"] == "inductor"


def test_options_must_be_a_mapping():
    with pytest.raises(ConfigError, match="must be a mapping"):
        resolve_options(["device"], env={})  # type: ignore[arg-type]


def test_the_callers_options_stay_as_they_are():
    options = {
        "device": "auto:cpu",
        "disabled_ops": ["aten::relu"],
        "config": {"PERFORMANCE_HINT": "latency", "DEVICE_PROPERTIES": {"cpu": {"NUM_STREAMS": "1"}}},
        "cache_dir": "x",
        "model_caching": "true",
    }
    before = copy.deepcopy(options)
    resolved = resolve_options(options, env={})
    resolved.options.ov_config()["INFERENCE_PRECISION_HINT"] = "changed"
    assert options == before
    assert resolved.options.ov_config()["INFERENCE_PRECISION_HINT"] == "f32"


def test_to_dict_is_json_with_values_and_sources():
    resolved = resolve_options({"disabled_ops": "aten.relu", "config": {"NUM_STREAMS": 1}}, env={})
    plain = json.loads(json.dumps(resolved.to_dict()))
    assert plain["disabled_ops"] == {"value": ["aten.relu"], "source": "options"}
    assert plain["config.NUM_STREAMS"] == {"value": 1, "source": "options"}
    assert plain["config.INFERENCE_PRECISION_HINT"] == {"value": "f32", "source": "default"}
    assert set(plain) == set(resolved.sources)


@given(st.sampled_from(sorted(OPTION_NAMES)), st.integers(0, 20), st.sampled_from("qz_"))
def test_a_misspelt_option_is_refused_with_the_right_one(name, index, letter):
    misspelt = name[:index] + letter + name[index:]
    with pytest.raises(ConfigError) as caught:
        resolve_options({misspelt: None}, env={})
    assert caught.value.suggestion == name


def test_importing_the_package_loads_neither_torch_nor_openvino():
    code = (
        "import sys, torchserve_openvino.config as c; c.resolve_options({'device': 'GPU'}, env={}, check_device=False);"
        "print(sorted({'torch', 'openvino', 'ts'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
