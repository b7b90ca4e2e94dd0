"""The editor schema and the reference page are generated from the declared keys and agree with the parser."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import config_reference
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.config.reference import json_schema, option_keys, section_keys
from torchserve_openvino.errors import ConfigError

TEMPLATES = sorted((Path(__file__).parents[3] / "model-config").glob("*.yaml"))
VALID: list[dict[str, Any]] = [
    {},
    {"pt2": "openvino"},
    {"pt2": {"backend": "export", "dynamic": None}},
    {"pt2": {"compile": {"enable": True, "options": {"disabled_ops": "aten.relu", "decompositions": ["aten.gelu"]}}}},
    {"pt2": {"compile": {"backend": "inductor", "options": {"max_autotune": True}}}},
    {"handler": {"openvino": {"batching": {"buckets": [1, 4], "one_graph": False}, "freeze": "auto", "threads": 2}}},
    {"handler": {"openvino": {"fallback": {"allow": []}, "verify": {"shadow": 0.001, "max_abs": 1e-3}}, "own": {}}},
    {"handler": {"openvino": {"warmup": {"inputs": [{"shape": [3, "width"], "dtype": "torch.float16"}]},
                              "batching": {"dims": {"width": 64}}}}},
]  # fmt: skip
INVALID: list[dict[str, Any]] = [
    {"batchsize": 1},
    {"batchSize": 0},
    {"pt2": {"compile": {"enabled": True}}},
    {"handler": {"openvino": {"batching": {"mode": "buckets"}}}},
    {"handler": {"openvino": {"batching": {"buckets": [0]}}}},
    {"handler": {"openvino": {"freeze": "maybe"}}},
    {"handler": {"openvino": {"fallback": {"allow": ["graph_breaks"], "min_coverage": 2}}}},
    {"handler": {"openvino": {"warmup": {"inputs": [{"shape": [3], "dtype": "float31"}]}}}},
    {"handler": {"openvino": {"cache": {"limit_gb": 0}}}},
    {"handler": {"openvino": {"shadow": 0.1}}},
]
SCHEMA = json_schema()


def accepts(data: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def test_the_generated_files_are_up_to_date() -> None:
    for path, text in config_reference.generated().items():
        assert path.read_text(encoding="utf-8") == text, "python scripts/config_reference.py --write"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "metrics"], ids=lambda path: path.stem)
def test_templates_are_valid_and_name_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert accepts(yaml.safe_load(text))


@pytest.mark.parametrize("data", VALID, ids=str)
def test_what_is_accepted_is_valid(data: dict[str, Any]) -> None:
    load_serving_config(data, check_device=False)
    assert accepts(data)


@pytest.mark.parametrize("data", INVALID, ids=str)
def test_what_is_refused_is_invalid(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_serving_config(data, check_device=False)
    assert not accepts(data)


def test_every_key_has_help_values_and_its_default() -> None:
    keys = {key.name: key for key in (*section_keys(), *option_keys())}
    assert all(key.help and key.type for key in keys.values())
    assert keys["batching.max_shapes"].type == "integer ≥ 1" and keys["batching.max_shapes"].default == "`16`"
    assert keys["verify.shadow"].type == "number ≥ 0 and ≤ 1"
    assert keys["image.std"].default == "`[0.229, 0.224, 0.225]`"
    assert keys["warmup.inputs[].shape"].help
    assert keys["disabled_ops"].type == "list of string"
