"""From a float model to int8 over REST, by the commands of docs/quantization.md."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import package, run
from torchserve_process import TorchServeProcess, metric

from digits import CODE, TRAINED, pictures, requests, trained
from documents import blocks, commands

pytest.importorskip("nncf")
pytest.importorskip("torchao")

pytestmark = pytest.mark.slow

PAGE = "docs/quantization.md"
NAME = "digits"


def test_a_float_model_is_served_in_int8(server: TorchServeProcess, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CODE)
    torch.save(trained().state_dict(), tmp_path / "weights.pth")
    requests(tmp_path / "photos", 0, 60)
    (tmp_path / "labels.json").write_text(json.dumps(requests(tmp_path / "held-out", TRAINED, 200)))
    (config,) = [block.text for block in blocks("yaml") if block.page == PAGE]
    (tmp_path / "model-config.yaml").write_text(config)
    (command,) = [line for line in commands() if line.startswith(f"torchserve-openvino package --model-name {NAME}")]
    made = package(command, tmp_path)
    assert made["quantized"]["evaluation"]["items"] == 200 and len(made["precompiled"]) == 1
    archive = tmp_path / "model-store" / f"{NAME}.mar"
    assert "weights.pth" not in zipfile.ZipFile(archive).namelist()
    target = Path(server.model_store) / archive.name
    target.write_bytes(archive.read_bytes())
    assert server.register(archive.name, NAME).status_code == 200
    server.wait_ready(NAME)
    try:
        labels = pictures()[1]
        url = f"{server.inference_url}/predictions/{NAME}"
        right = 0
        for number in range(TRAINED, TRAINED + 100):
            body = (tmp_path / "held-out" / f"{number}.npy").read_bytes()
            scores = np.load(io.BytesIO(server.http.post(url, content=body).content))
            right += int(scores.argmax() == int(labels[number]))
        assert right >= 95
        (described,) = server.http.get(f"{server.management_url}/models/{NAME}?customized=true").json()
        report = described["customizedMetadata"]
        assert report["summary"]["precision"] == "int8" and report["summary"]["coverage"] == 1.0
        assert report["verify"]["passed"] and not report["fallbacks"]
        assert report["config"]["quantized"]["method"] == "int8" and report["cache"]["compiles"] == 0
        kernels = [each for part in report["graphs"][0]["partitions"] for each in part["kernels"]]
        assert {each["precision"] for each in kernels if each["kind"] in {"Convolution", "FullyConnected"}} == {"u8"}
        assert report["summary"]["precisions"]["u8"] > 0.3
        assert metric(server, "openvino_time_ratio", NAME) == pytest.approx(1.0, abs=0.01)
        refused = server.http.post(url.replace("predictions", "explanations"), content=body)
        assert refused.status_code >= 400
    finally:
        server.http.delete(f"{server.management_url}/models/{NAME}")


def test_a_model_that_is_quantized_already(tmp_path: Path) -> None:
    """``--from`` takes it, compares it, and refuses one that answers otherwise."""
    (tmp_path / "model.py").write_text(CODE)
    torch.save(trained().state_dict(), tmp_path / "weights.pth")
    np.savez(tmp_path / "held-out.npz", pictures()[0][TRAINED : TRAINED + 100].numpy())
    (tmp_path / "labels.json").write_text(json.dumps(pictures()[1][TRAINED : TRAINED + 100].tolist()))
    quantize = {"method": "int8_weights", "evaluation": {"data": "held-out.npz", "labels": "labels.json"}}
    config = {
        "pt2": {"compile": {"enable": True, "backend": "openvino"}},
        "handler": {"openvino": {"warmup": {"inputs": [{"shape": [1, 8, 8]}]}, "quantize": quantize}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    command = "x package --model-name d --model-file model.py --serialized-file weights.pth --config-file c.yaml"
    for name, model in (("right", trained()), ("wrong", torch.nn.Sequential(trained(), torch.nn.Softmin(1)))):
        batch = {0: torch.export.Dim.DYNAMIC}
        torch.export.save(
            torch.export.export(model.eval(), (pictures()[0][:2],), dynamic_shapes=(batch,)), tmp_path / f"{name}.pt2"
        )
    made = package(command, tmp_path, "--from", "right.pt2")
    assert made["quantized"]["from"] == "right.pt2" and made["quantized"]["evaluation"]["steps"][0]["drop"] == 0
    done = run(command, tmp_path, "--force", "--from", "wrong.pt2")
    assert done.returncode == 1 and "loses too much: top1 is 0.0" in done.stderr
    (tmp_path / "no.pt2").write_bytes(b"x")
    done = run(command, tmp_path, "--force", "--from", "no.pt2")
    assert done.returncode == 1 and "--from: torch.export.load could not read no.pt2" in done.stderr
