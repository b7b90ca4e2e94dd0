"""`handler.openvino.precision` beside the options of OpenVINO: a contradiction is refused, and nothing is ignored."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from torchserve_openvino.config import load_serving_config
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


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_template_takes_another_precision(path) -> None:
    document = yaml.safe_load(path.read_text())
    if path.stem == "metrics":
        return
    if document["pt2"]["compile"]["options"].get("device") == "NPU":
        pytest.skip("an NPU has one precision")
    document["handler"].setdefault("openvino", {})["precision"] = "auto"
    load_serving_config(document, check_device=False)
