"""`torchserve-openvino init` writes a configuration that loads, with the inputs of a sample."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.packaging.starter import TASKS, templates, with_inputs

FILES = ["config.properties", "metrics.yaml", "model-config.yaml", "schema.json"]


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["init", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("task", TASKS)
def test_it_writes_what_a_model_begins_with(tmp_path: Path, task: str) -> None:
    output = run(tmp_path / "new", "--task", task)
    assert all(f"wrote {tmp_path / 'new' / name}" in output for name in FILES)
    load_serving_config(tmp_path / "new" / "model-config.yaml")
    assert (tmp_path / "new" / "model-store").is_dir()
    properties = (tmp_path / "new" / "config.properties").read_text()
    assert "inference_address=http://127.0.0.1:8080" in properties
    assert f"metrics_config={(tmp_path / 'new' / 'metrics.yaml').resolve()}" in properties


def test_a_sample_of_numbers_shows_the_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8), dtype=np.float32))
    run(tmp_path / "new", "--sample", tmp_path / "x.npy")
    config = load_serving_config(tmp_path / "new" / "model-config.yaml")
    (spec,) = config.openvino.warmup.inputs
    assert (spec.name, spec.shape, spec.dtype) == (None, [3, 8], "float32")


def test_a_sample_of_tokens_shows_names_lengths_and_the_mask(tmp_path: Path) -> None:
    tokens = {name: [[5, 6, 7]] for name in ("input_ids", "attention_mask", "token_type_ids")}
    (tmp_path / "tokens.json").write_text(json.dumps({"inputs": tokens}))
    run(tmp_path / "new", "--task", "text", "--sample", tmp_path / "tokens.json")
    config = load_serving_config(tmp_path / "new" / "model-config.yaml")
    found = {spec.name: (spec.shape, spec.dtype, spec.mask) for spec in config.openvino.warmup.inputs}
    assert found == {
        "input_ids": (["sequence"], "int64", False),
        "attention_mask": (["sequence"], "int64", True),
        "token_type_ids": (["sequence"], "int64", False),
    }


@pytest.mark.parametrize("name", sorted(templates()))
def test_inputs_take_the_place_of_those_of_every_template(name: str) -> None:
    text = with_inputs(templates()[name].read_text(), [{"shape": [7], "dtype": "int64"}])
    assert text.count("warmup:") == 1
    read = yaml.safe_load(text)["handler"]["openvino"]
    assert read["warmup"] == {"inputs": [{"shape": [7], "dtype": "int64"}]}
    before = yaml.safe_load(templates()[name].read_text())["handler"]["openvino"]
    assert {k: v for k, v in read.items() if k != "warmup"} == {k: v for k, v in before.items() if k != "warmup"}


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_text("mine")
    assert "--force" in run(tmp_path, code=1)
    assert not (tmp_path / "model-config.yaml").exists() and (tmp_path / "metrics.yaml").read_text() == "mine"
    run(tmp_path, "--force")
    assert (tmp_path / "metrics.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "image_classifer"], "Did you mean 'image_classifier'?"),
        (["--config", "cpu_latency"], "Did you mean 'cpu-latency'?"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in run(tmp_path, *arguments, code=1)


def test_a_sample_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("no json")
    assert "the sample is not a request of tensors" in run(tmp_path, "--sample", tmp_path / "x.json", code=1)
