"""A GPTQ folder as text_generator: packaged, checked, served by the engine and in eager PyTorch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generation_engines import SMALL, Served
from typer.testing import CliRunner

from chat_models import language_model, text_of, tokenizer
from language_models import greedy
from quantized_folders import Packing, configure, save_quantized
from torchserve_openvino.cli import app
from torchserve_openvino.packaging.check_archive import check_archive


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import AutoModelForCausalLM

    plain = language_model(tmp_path_factory.mktemp("plain"))
    folder = tmp_path_factory.mktemp("gptq")
    model = save_quantized(folder, AutoModelForCausalLM.from_pretrained(plain), Packing(symmetric=False))
    tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture
def eager(checkpoint: Any, tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path / "archive", checkpoint[0], compile={"enable": False})
    yield found
    found.close()


def test_eager_pytorch_serves_the_dequantized_model(eager: Served, checkpoint: Any) -> None:
    (ids,) = tokenizer()("Hello", return_tensors="pt").input_ids.tolist()
    with torch.no_grad():
        wanted = greedy(checkpoint[1], ids, 9)
    answer = eager({"prompt": "Hello", "max_tokens": 9})
    assert text_of(wanted).startswith(answer["text"]) and answer["generated_tokens"] > 0
    report = eager.handler.describe_handle()
    assert report["generate"]["weights"] == "f32 (dequantized gptq-int4)"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "weights"), [(None, "gptq-int4"), ("compile", "f32 (dequantized gptq-int4)")])
def test_both_engines_serve_it(checkpoint: Any, tmp_path: Path, engine: str | None, weights: str) -> None:
    served = Served(tmp_path / "archive", checkpoint[0], generate={"engine": engine} if engine else {})
    (ids,) = tokenizer()("Hello", return_tensors="pt").input_ids.tolist()
    answer = served({"prompt": "Hello", "max_tokens": 9})
    report = served.handler.describe_handle()["generate"]
    served.close()
    assert (report["engine"], report["weights"]) == (engine or "genai", weights)
    assert text_of(greedy(checkpoint[1], ids, 9)).startswith(answer["text"]) and answer["generated_tokens"] > 0


def package(folder: Path, place: Path, section: dict[str, Any], *more: str) -> Any:
    config = place / "model-config.yaml"
    config.write_text(json.dumps({"handler": {"openvino": {"generate": section}}}))
    command = ["package", "--hf", str(folder), "--task", "text-generation", "--model-name", "gen", *more]
    return CliRunner().invoke(app, [*command, "--config-file", str(config), "--export-path", str(place)])


def test_a_folder_is_packaged_and_checked(checkpoint: Any, tmp_path: Path) -> None:
    done = package(checkpoint[0], tmp_path, {})
    assert done.exit_code == 0, done.output
    assert check_archive(tmp_path / "gen.mar", check_device=True).problems == []


def test_a_format_that_does_not_fit_fails_the_check(checkpoint: Any, tmp_path: Path) -> None:
    done = package(checkpoint[0], tmp_path, {"weights": "int4"})
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "generate.weights" in said and "4 bits already" in said


def test_an_unsupported_folder_is_not_packaged(checkpoint: Any, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "other"))
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 2})
    done = package(folder, tmp_path, {})
    assert done.exit_code == 1 and "bits is 2; supported: 4, 8" in " ".join(done.output.split())


@pytest.mark.slow
def test_an_archive_starts_with_what_was_packed_for_it(checkpoint: Any, tmp_path: Path) -> None:
    done = package(checkpoint[0], tmp_path, SMALL, "--precompile")
    assert done.exit_code == 0, done.output
    checked = CliRunner().invoke(app, ["package", "--check", str(tmp_path / "gen.mar"), "--json"])
    assert json.loads(checked.stdout)["start"] == "from IR", checked.stdout
