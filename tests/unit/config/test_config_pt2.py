import copy
import subprocess
import sys

import pytest

from torchserve_openvino.config import ConfigErrors, load_serving_config
from torchserve_openvino.errors import ConfigError


def load(pt2, **kwargs):
    return load_serving_config({"pt2": pt2}, env={}, **kwargs)


def test_without_pt2_it_is_openvino():
    config = load_serving_config({}, env={})
    assert (config.pt2.form, config.pt2.enabled, config.pt2.backend) == ("none", True, "openvino")
    rows = {row.key: row for row in config.effective()}
    assert rows["pt2.backend"].source == "default"
    assert config.backend is not None


@pytest.mark.parametrize("backend", ["openvino", "openvino_serving", "openvino_ts", "export"])
def test_the_three_forms(backend):
    options = {"device": "CPU", "disabled_ops": "aten::relu"}
    string = load(backend)
    mapping = load({"backend": backend, "dynamic": True, "fullgraph": True, "options": options})
    nested = load({"compile": {"enable": True, "backend": backend, "dynamic": "true", "options": options}})
    assert [each.pt2.form for each in (string, mapping, nested)] == ["string", "mapping", "compile"]
    assert all(each.pt2.backend == backend and each.pt2.is_openvino for each in (string, mapping, nested))
    assert mapping.pt2.dynamic is True
    assert nested.pt2.dynamic is True
    assert mapping.pt2.fullgraph is True
    for each in (mapping, nested):
        assert each.backend is not None
        assert each.backend.options.disabled_ops == ("aten.relu",)


def test_a_mapping_without_a_backend_is_openvino():
    assert load({"dynamic": False}).pt2.backend == "openvino"
    assert load({"compile": {"enable": True}}).pt2.backend == "openvino"
    assert load({"compile": None}).pt2.enabled is True


@pytest.mark.parametrize("value", [False, "false", "False"])
def test_enable_false_means_no(value):
    assert load({"compile": {"enable": value, "backend": "openvino"}}).pt2.enabled is False


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_enable_true_means_yes(value):
    assert load({"compile": {"enable": value}}).pt2.enabled is True


@pytest.mark.parametrize("value", [2, 1.5, [], "flase", "maybe"])
def test_enable_takes_nothing_else(value):
    with pytest.raises(ConfigError, match="must be true or false") as caught:
        load({"compile": {"enable": value}})
    assert caught.value.key == "pt2.compile.enable"


@pytest.mark.parametrize(
    ("pt2", "key"),
    [
        ("auto", "pt2"),
        ({"backend": "auto"}, "pt2.backend"),
        ({"compile": {"backend": "auto"}}, "pt2.compile.backend"),
    ],
)
def test_a_backend_that_is_gone_names_its_replacement(pt2, key):
    with pytest.raises(ConfigError, match="torchserve-openvino tune.*openvino, openvino_ts, export") as raised:
        load(pt2)
    assert key in str(raised.value)


def test_disable_of_torch_compile():
    assert load({"backend": "openvino", "disable": True}).pt2.enabled is False


@pytest.mark.parametrize(
    ("pt2", "key", "suggestion"),
    [
        ("openvno", "pt2", "openvino"),
        ({"backend": "Openvino"}, "pt2.backend", "openvino"),
        ({"compile": {"backend": "openvino_tss"}}, "pt2.compile.backend", "openvino_ts"),
        ("exprt", "pt2", "export"),
        ({"compile": {"backend": "inductr"}}, "pt2.compile.backend", "inductor"),
        ({"compile": {"backend": 3}}, "pt2.compile.backend", None),
        ({"compile": {"enabled": True}}, "pt2.compile.enabled", "enable"),
        ({"compile": {"dynamc": True}}, "pt2.compile.dynamc", "dynamic"),
        ({"complie": {"enable": True}}, "pt2.complie", "compile"),
        ({"enable": True}, "pt2.enable", "compile.enable"),
        ({"backend": "openvino", "optoins": {}}, "pt2.optoins", "options"),
        ({"compile": {"options": 3}}, "pt2.compile.options", None),
        ({"compile": {"backend": "inductor", "options": 3}}, "pt2.compile.options", None),
        ({"compile": {"options": {"devise": "CPU"}}}, "pt2.compile.options.devise", "device"),
        ({"compile": 3}, "pt2.compile", None),
        ({"compile": {"dynamic": "maybe"}}, "pt2.compile.dynamic", None),
        (3, "pt2", None),
        (["openvino"], "pt2", None),
        ({"compile": {"backend": "inductor", "mode": "max-autotun"}}, "pt2.compile.mode", "max-autotune"),
    ],
)
def test_mistakes(pt2, key, suggestion):
    with pytest.raises(ConfigError) as caught:
        load(pt2)
    assert caught.value.key == key
    assert caught.value.suggestion == suggestion


def test_a_mode_means_nothing_to_openvino():
    with pytest.raises(ConfigError, match="PERFORMANCE_HINT"):
        load({"compile": {"mode": "max-autotune"}})
    assert load({"compile": {"mode": "default"}}).pt2.mode is None


def test_a_foreign_backend_passes_through():
    config = load({"compile": {"backend": "inductor", "options": {"triton.cudagraphs": False}}})
    assert config.backend is None
    assert not config.pt2.is_openvino
    assert config.pt2.options == {"triton.cudagraphs": False}
    assert load({"backend": "aot_eager"}).pt2.backend == "aot_eager"
    assert load({"backend": "inductor", "mode": "max-autotune"}).pt2.mode == "max-autotune"
    with pytest.raises(ConfigError, match="cannot be combined with options"):
        load({"backend": "inductor", "mode": "max-autotune", "options": {"a": 1}})


@pytest.mark.parametrize("extra", [{}, {"compile": {"enable": True}}])
def test_aot_compile_is_refused_with_the_way_out(extra):
    with pytest.raises(ConfigError, match=r"pt2: \{compile: \{enable: true, backend: openvino\}\}") as caught:
        load({"export": {"aot_compile": True}, **extra})
    assert caught.value.key == "pt2.export.aot_compile"
    assert load({"export": {"aot_compile": False}}).pt2.form == "export"
    with pytest.raises(ConfigError) as caught:
        load({"export": {"aot_compil": False}})
    assert caught.value.suggestion == "aot_compile"


def test_several_mistakes_and_an_unchanged_mapping():
    data = {"pt2": {"compile": {"enable": "maybe", "bakend": "x", "options": {"device": "CPV"}}}}
    before = copy.deepcopy(data)
    with pytest.raises(ConfigErrors) as caught:
        load_serving_config(data, env={}, location="net.yaml")
    assert {p.key for p in caught.value.problems} == {
        "pt2.compile.enable",
        "pt2.compile.bakend",
        "pt2.compile.options.device",
    }
    assert all(p.location == "net.yaml" for p in caught.value.problems)
    assert data == before


def test_torch_is_not_imported_for_this_backend():
    code = (
        "import sys; from torchserve_openvino.config import load_serving_config as l;"
        "l({'pt2': {'compile': {'enable': True, 'backend': 'openvino'}}}, env={}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_comparing_first_calls_is_for_python_only():
    with pytest.raises(ConfigError, match="READY"):
        load({"compile": {"enable": True, "backend": "openvino", "options": {"verify": "first"}}})
