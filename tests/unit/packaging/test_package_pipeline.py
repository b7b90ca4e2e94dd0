"""`package --hf` with a diffusers pipeline: which files go into an archive, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffusion_models import pipeline_folder
from torchserve_openvino.cli import app
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.check_archive import check_archive
from torchserve_openvino.packaging.hub_model import check_loads, hub_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_folder("sd", tmp_path_factory.mktemp("pipe") / "tiny-sd")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny-sd"))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("task", [(), ("--task", "text-to-image")])
def test_an_archive_without_code(saved: Path, tmp_path: Path, task: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["package", "--hf", str(saved), *task, "--export-path", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["task"] == "image_generator"
    with zipfile.ZipFile(tmp_path / "tiny-sd.mar") as archive:
        names = set(archive.namelist())
        config = archive.read("image-generation.yaml").decode()
    assert {
        "hub/model_index.json", "hub/unet/config.json", "hub/unet/diffusion_pytorch_model.safetensors",
        "hub/vae/diffusion_pytorch_model.safetensors", "hub/text_encoder/model.safetensors",
        "hub/tokenizer/tokenizer.json", "hub/scheduler/scheduler_config.json", "image_generator.py",
    } <= names  # fmt: skip
    assert "image_generation:" in config
    assert check_archive(tmp_path / "tiny-sd.mar", check_device=True).problems == []


@pytest.mark.slow
def test_an_archive_with_its_compiled_graphs_starts_warm(saved: Path, tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text("handler: {openvino: {image_generation: {sizes: [32x32], image_to_image: false}}}\n")
    arguments = ["--hf", str(saved), "--config-file", str(config), "--export-path", str(tmp_path), "--precompile"]
    done = CliRunner().invoke(app, ["package", *arguments])
    assert done.exit_code == 0, done.output
    assert "3 graph(s), 100% on OpenVINO" in done.output and "starts cold" not in done.output
    checked = CliRunner().invoke(app, ["package", "--check", str(tmp_path / "tiny-sd.mar")])
    assert checked.exit_code == 0 and "starts warm here" in checked.output, checked.output


def test_variants_pickles_and_code_are_left_out(folder: Path) -> None:
    unwanted = (
        "unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin", "unet/own.py",
        "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
    )  # fmt: skip
    for name in (*unwanted, "pipeline.py", "single_file.safetensors"):
        (folder / name).write_bytes(b"x")
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_bytes(b"{}")
    names = {path.as_posix() for path in hub_model(folder, None).files}
    assert names.isdisjoint({*unwanted, "pipeline.py", "single_file.safetensors"})
    assert "unet/diffusion_pytorch_model.safetensors.index.json" in names


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        ({"_class_name": "KandinskyPipeline"}, None, "KandinskyPipeline, which is not served; served are"),
        ({"_class_name": ["own_pipeline", "Own"]}, None, "which is not served"),
        ({}, "reranker", "a pipeline for image_generator, not for reranker"),
    ],
)
def test_what_is_no_such_pipeline_says_why(folder: Path, changes: dict, task: str | None, message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(PackagingError, match=message):
        hub_model(folder, task)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unet": ["own_unet", "OwnUNet"]}, "unet is OwnUNet; Stable Diffusion needs UNet2DConditionModel"),
        ({"text_encoder": [None, None]}, "text_encoder is missing"),
        ({"scheduler": ["own", "OwnScheduler"]}, "scheduler OwnScheduler, which diffusers does not have"),
        ({"scheduler": ["os", "UNet2DConditionModel"]}, "which diffusers does not have"),
        ({"safety_checker": ["own", "OwnChecker"]}, "safety checker OwnChecker"),
    ],
)
def test_components_of_other_classes_are_refused(folder: Path, changes: dict, message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(PackagingError, match=message):
        check_loads(hub_model(folder, None))


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    import torch

    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(PackagingError, match="unet has no weights as safetensors"):
        check_loads(hub_model(folder, None))
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_named(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["conv_in.weight"]
    save_file(weights, path)
    with pytest.raises(PackagingError, match=r"unet.*conv_in\.weight"):
        check_loads(hub_model(folder, None))


def test_another_models_folder_is_no_pipeline(tmp_path: Path) -> None:
    from hub_models import text_model

    folder = text_model("token_classifier", tmp_path / "ner")
    with pytest.raises(PackagingError, match="model_index.json cannot be read"):
        check_loads(hub_model(folder, "text-to-image"))


FINGERPRINTS = """
import sys
from pathlib import Path
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.config.sections.task_sections import ImageGenerationSection
from torchserve_openvino.generation.images.components import Components
from torchserve_openvino.generation.images.loading import load
found = Components(load(Path(sys.argv[1])))
for part in found.parts([found.own_size], ImageGenerationSection()):
    seen = fingerprint(part.calls.graph)
    print(part.name, seen.code, seen.weights, seen.unknown)
"""


@pytest.mark.slow
def test_the_cache_knows_a_pipeline_in_another_folder_and_process(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    found = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINTS, str(each)], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.splitlines()[-4:]
        for each, seed in ((folder, "1"), (other, "2"))
    ]  # fmt: skip
    assert found[0] == found[1] and all(line.endswith("()") for line in found[0])
    assert [line.partition(" ")[0] for line in found[0]] == ["text_encoder", "unet", "vae.decode", "vae.encode"]
