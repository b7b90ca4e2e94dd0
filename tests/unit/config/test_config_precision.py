"""`handler.openvino.precision` beside the options of OpenVINO: a contradiction is refused, and nothing is ignored."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from torchserve_openvino.config import load_serving_config, resolve_options
from torchserve_openvino.config.openvino import precisions
from torchserve_openvino.errors import ConfigError

TEMPLATES = Path(__file__).resolve().parents[3] / "model-config"


def load(precision: str | None, options: dict[str, Any] | None = None, **pt2: Any) -> Any:
    section = {} if precision is None else {"precision": precision}
    document = {
        "pt2": {"compile": {"enable": True, "backend": "openvino", "options": options or {}, **pt2}},
        "handler": {"openvino": section},
    }
    return load_serving_config(document, check_device=False)


HINT, MODE = "INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT"


@pytest.mark.parametrize(
    ("precision", "config", "name"),
    [
        ("auto", {HINT: "f32"}, f"config.{HINT} is f32"),
        ("bf16", {HINT: "f32"}, f"config.{HINT} is f32"),
        ("f32", {HINT: "bf16"}, f"config.{HINT} is bf16"),
        ("auto", {MODE: "ACCURACY"}, f"config.{MODE} is ACCURACY"),
        ("f32", {MODE: "PERFORMANCE"}, f"config.{MODE} is PERFORMANCE"),
        ("f32", {"DEVICE_PROPERTIES": {"CPU": {HINT: "bf16"}}}, f"config.DEVICE_PROPERTIES.CPU.{HINT} is bf16"),
    ],
)
def test_a_contradiction_names_both_keys_and_the_fix(precision, config, name) -> None:
    device = "HETERO:GPU,CPU" if "DEVICE_PROPERTIES" in config else "CPU"
    with pytest.raises(ConfigError) as raised:
        load(precision, {"device": device, "config": config})
    message = str(raised.value)
    assert f"handler.openvino.precision: is {precision}" in message and f"pt2.compile.options.{name}" in message
    assert "remove" in message


@pytest.mark.parametrize(
    ("precision", "config"),
    [
        (None, {HINT: "bf16"}), (None, {MODE: "PERFORMANCE"}), ("bf16", {HINT: "bf16"}), ("f32", {HINT: "float32"}),
        ("f32", {MODE: "ACCURACY"}), ("auto", {}), ("bf16", {"PERFORMANCE_HINT": "LATENCY"}),
    ],
)  # fmt: skip
def test_what_agrees_is_accepted(precision, config) -> None:
    assert load(precision, {"config": config}).backend is not None


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_precision_without_effect_is_refused(precision) -> None:
    with pytest.raises(ConfigError, match=r"precision: has no effect on NPU.*remove"):
        load(precision, {"device": "NPU"})
    with pytest.raises(ConfigError, match=r"precision: has no effect with the backend inductor"):
        load(precision, backend="inductor")


NO_AMX = "Intel AVX-512 with Intel DL Boost and bfloat16 support"
AMX = "Intel AVX10.1 and Intel AMX with bfloat16 and 8-bit integer support"


def test_bf16x3_without_amx_is_refused_before_the_model_loads(monkeypatch) -> None:
    monkeypatch.setattr(precisions, "instruction_set", lambda: NO_AMX)
    document = {"pt2": {"compile": {"backend": "openvino"}}, "handler": {"openvino": {"precision": "bf16x3"}}}
    reason = rf"bf16x3 needs a CPU with AMX for bfloat16; OpenVINO uses {NO_AMX} on this one\. Set f32, or auto"
    with pytest.raises(ConfigError, match=rf"handler\.openvino\.precision: {reason}"):
        load_serving_config(document)
    with pytest.raises(ConfigError, match=rf"precision: {reason}"):
        resolve_options({"precision": "bf16x3"})
    # As `check` does for another machine.
    assert load_serving_config(document, check_device=False).openvino.precision == "bf16x3"


@pytest.mark.parametrize("device", ["AUTO:CPU", "GPU"])
def test_bf16x3_is_for_the_cpu_only(device) -> None:
    with pytest.raises(ConfigError, match=rf"precision: bf16x3 is for the device CPU only, and the device is {device}"):
        load("bf16x3", {"device": device})
    with pytest.raises(ConfigError, match=rf"precision: bf16x3 is for the device CPU only, and the device is {device}"):
        resolve_options({"precision": "bf16x3", "device": device}, check_device=False)


def test_the_option_sets_the_hint_and_states_its_source(monkeypatch) -> None:
    monkeypatch.setattr(precisions, "instruction_set", lambda: AMX)
    resolved = resolve_options({"precision": "bf16x3"})
    assert resolved.options.ov_config()[HINT] == "bf16x3" and resolved.sources[f"config.{HINT}"] == "options"
    assert load(None, {"precision": "bf16"}).backend.options.ov_config()[HINT] == "bf16"
    assert resolve_options({}).options.precision is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "f32", "config": {HINT: "f32"}}, f"is f32, and config.{HINT} sets a precision, too; remove"),
        ({"precision": "f32", "config": {MODE: "ACCURACY"}}, f"is f32, and config.{MODE} sets a precision, too"),
        ({"precision": "bf16x2"}, "must be one of .*bf16x3.*not 'bf16x2'.*did you mean 'bf16x3'"),
        ({"precision": ["f32"]}, "must be one of"),
    ],
)
def test_an_option_that_is_wrong_or_stated_twice_is_refused(options, says) -> None:
    with pytest.raises(ConfigError, match=rf"(?i)precision: {says}"):
        resolve_options(options, check_device=False)


def test_the_key_beside_the_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision: is f32, and pt2.compile.options.precision is bf16; remove one"):
        load("f32", {"precision": "bf16"})


def test_what_the_hint_cannot_express_is_no_value_of_it() -> None:
    with pytest.raises(ConfigError, match=f"{HINT}: must be one of"):
        load(None, {"config": {HINT: "bf16x3"}})


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_template_takes_another_precision(path) -> None:
    document = yaml.safe_load(path.read_text())
    if path.stem == "metrics":
        return
    if document["pt2"]["compile"]["options"].get("device") == "NPU":
        pytest.skip("an NPU has one precision")
    document["handler"].setdefault("openvino", {})["precision"] = "auto"
    load_serving_config(document, check_device=False)
