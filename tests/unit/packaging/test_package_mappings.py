"""A user's operator mappings in an archive: packaged with it, used by the worker, part of the cache key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_package import loaded, started
from typer.testing import CliRunner

from torchserve_openvino.cli import app

MODEL = """
import torch
from torch import nn

import my_ops


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.ops.tovpackaged.swish2(self.linear(x)) + 1
"""
OPS = """
import openvino.opset13 as ops
import torch

import torchserve_openvino as tov

LIBRARY = torch.library.Library("tovpackaged", "DEF")
LIBRARY.define("swish2(Tensor x) -> Tensor")
LIBRARY.impl("swish2", lambda x: x * torch.sigmoid(2 * x), "CompositeExplicitAutograd")


@tov.register_op("tovpackaged::swish2")
def swish2(x):
    return ops.multiply(x, ops.sigmoid(ops.multiply(x, ops.constant(2.0, dtype=x.get_element_type()))))
"""
CONFIG = """
pt2:
  compile:
    enable: true
    backend: openvino
    options: {model_caching: true, cache_dir: CACHE, config: {INFERENCE_PRECISION_HINT: f32}}
handler:
  openvino:
    op_mappings: my_ops.py
    warmup: {inputs: [{name: x, shape: [4]}]}
    fallback: {allow: [], on_violation: refuse}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "my_ops.py").write_text(OPS)
    (tmp_path / "model-config.yaml").write_text(CONFIG.replace("CACHE", str(tmp_path / "cache")))
    weights = {"linear.weight": torch.randn(4, 4), "linear.bias": torch.randn(4)}
    torch.save(weights, tmp_path / "weights.pth")
    return tmp_path


def package(sources: Path, *more: str) -> Any:
    files = ("--model-file", sources / "model.py", "--serialized-file", sources / "weights.pth")
    where = ("--config-file", sources / "model-config.yaml", "--export-path", sources)
    return CliRunner().invoke(app, ["package", "--model-name", "net", *map(str, (*files, *where)), *more])


@pytest.mark.slow
def test_the_file_goes_along_and_is_part_of_the_key(sources: Path, tmp_path: Path) -> None:
    result = package(sources)
    assert result.exit_code == 0, result.output
    cold = started(sources / "net.mar", tmp_path / "a")
    assert cold["summary"]["coverage"] == 1.0 and cold["verify"]["passed"] and cold["cache"]["status"] == "miss"
    assert loaded(tmp_path / "a")["cache"]["status"] == "hit"
    # With another formula, what was compiled with the first must not be found.
    changed = OPS.replace("2.0, dtype", "3.0, dtype").replace("2 * x", "3 * x")
    (tmp_path / "a" / "my_ops.py").write_text(changed)
    other = loaded(tmp_path / "a")
    assert other["cache"]["status"] == "miss" and "mappings" in other["cache"]["nearest"] and other["verify"]["passed"]


def test_a_file_that_is_not_there_is_told_before_anything_is_packed(sources: Path) -> None:
    (sources / "my_ops.py").unlink()
    result = package(sources)
    assert result.exit_code == 1 and "my_ops.py in handler.openvino.op_mappings" in result.output
