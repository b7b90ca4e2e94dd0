"""An archive with both models: `precision` says which one is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from digits import CODE, TRAINED, pictures, trained
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.packaging.build_archive import Recipe, make
from torchserve_openvino.serving.torchserve.archive_loader import load_without_server
from torchserve_openvino.serving.torchserve.base import worker_of

pytest.importorskip("nncf")
pytest.importorskip("torchao")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive."""
    place = tmp_path_factory.mktemp("both")
    # A name of its own: other tests import a `model` in this process.
    code = place / "digits_beside_f32.py"
    code.write_text(CODE)
    torch.save(trained().state_dict(), place / "w.pth")
    np.savez(place / "x.npz", pictures()[0][:60].numpy())
    quantize = {"method": "int8", "calibration": {"data": str(place / "x.npz")}, "keep_f32": True}
    section = {"warmup": {"inputs": [{"shape": [1, 8, 8]}]}, "quantize": quantize}
    config = {
        "batchSize": 8,
        "pt2": {"compile": {"enable": True, "backend": "openvino"}},
        "handler": {"openvino": section},
    }
    (place / "c.yaml").write_text(yaml.safe_dump(config))
    arguments = [
        "--version",
        "1.0",
        "--handler",
        str(handlers()["tensor"]),
        "--model-file",
        str(code),
    ]
    arguments += ["--serialized-file", str(place / "w.pth"), "--config-file", str(place / "c.yaml")]
    made = make(Recipe("d", arguments), place / "d.mar", lambda _: None)
    assert made["quantized"]["keeps_f32"]
    (place / "unpacked").mkdir()
    extract(place / "d.mar", place / "unpacked")
    return place / "unpacked"


@pytest.mark.parametrize(
    ("precision", "served"), [(None, {"int8"}), ("f32", {"f32"}), ("auto", {"int8", "f32", "bf16"})]
)
def test_precision_chooses(both: Path, precision: str | None, served: set[str], tmp_path: Path) -> None:
    place = tmp_path / "archive"
    shutil.copytree(both, place)
    document: dict[str, Any] = yaml.safe_load((place / "c.yaml").read_text())
    if precision is not None:
        document["handler"]["openvino"]["precision"] = precision
    (place / "c.yaml").write_text(yaml.safe_dump(document))
    handler = load_without_server(place)
    report = handler.describe_handle()
    assert report["summary"]["precision"] in served and report["summary"]["coverage"] == 1.0
    assert report["verify"]["passed"]
    kinds = {kernel.precision for kernel in worker_of(handler).report.kernels() if kernel.kind == "Convolution"}
    assert kinds == {{"int8": "u8"}.get(report["summary"]["precision"], report["summary"]["precision"])}
    if precision == "auto":
        choice = report["config"]["precision_choice"]
        assert "int8" in choice["tried"] and choice["tried"]["int8"]["passed"]
        assert report["summary"]["precision"] == choice["chosen"]
    images, labels = pictures()
    body = json.dumps(images[TRAINED : TRAINED + 8].tolist()).encode()
    (answer,) = worker_of(handler).run_sample(body)
    found = np.asarray(json.loads(answer) if isinstance(answer, (str, bytes)) else answer)
    assert (found.argmax(-1) == labels[TRAINED : TRAINED + 8].numpy()).mean() >= 0.75
