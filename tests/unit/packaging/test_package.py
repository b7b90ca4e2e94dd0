"""`torchserve-openvino package`: real archives with compiled graphs, and their inspection."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deadly_model
from encoder import ENCODER, encoder
from torchserve_openvino.cache.open import PACKAGED_FOLDER
from torchserve_openvino.cli import app
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging import inspect as inspection
from torchserve_openvino.packaging.archive import extract, write
from torchserve_openvino.packaging.build_archive import build_wheel
from torchserve_openvino.packaging.inspect import inspect

CONFIG = """
batchSize: 2
pt2: {compile: {enable: true, backend: openvino, options: {config: {INFERENCE_PRECISION_HINT: f32}}}}
handler:
  openvino:
    warmup: {inputs: [{name: ids, shape: [4], dtype: int64, low: 0, high: 50}]}
"""


def package(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["package", *map(str, arguments)])


def words(output: str) -> str:
    """The text in a panel of the command line's."""
    return " ".join(output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "model.py").write_text(ENCODER)
    (folder / "model-config.yaml").write_text(CONFIG)
    torch.save(encoder().state_dict(), folder / "weights.pth")
    return folder


def options(sources: Path, target: Path, model: Path | None = None, config: Path | None = None) -> list[object]:
    model, config = model or sources / "model.py", config or sources / "model-config.yaml"
    return [
        *("--model-name", "small", "--model-file", model, "--serialized-file", sources / "weights.pth"),
        *("--handler", "tensor", "--config-file", config, "--export-path", target),
    ]


@pytest.fixture(scope="module")
def packed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("store")
    result = package(*options(sources, target), "--precompile", "--level", "sse4")
    assert result.exit_code == 0, result.output
    assert "compiled for any CPU with sse4" in result.stdout
    return target / "small.mar"


def names_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as content:
        return set(content.namelist())


def test_extra_files_are_separated_by_commas_as_for_the_archiver(sources: Path, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "e.txt"):
        (tmp_path / name).write_text(name)
    extra = f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}"
    arguments = options(sources, tmp_path / "store")
    result = package(*arguments, "--extra-files", extra, "--extra-files", tmp_path / "e.txt")
    assert result.exit_code == 0, result.output
    assert {"a.txt", "b.txt", "e.txt"} <= names_in(tmp_path / "store" / "small.mar")
    result = package(*options(sources, tmp_path / "other"), "--extra-files", f"{tmp_path / 'a.txt'},absent.txt")
    assert result.exit_code != 0 and "absent.txt" in result.output


def test_samples_that_the_configuration_names_are_added(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("[[1, 2, 3, 4]]")
    (tmp_path / "model-config.yaml").write_text(f"{CONFIG.rstrip()[:-1]}, samples: [request.json]}}\n")
    arguments = options(sources, tmp_path / "store", config=tmp_path / "model-config.yaml")
    result = package(*arguments)
    assert result.exit_code == 0, result.output
    assert "request.json" in names_in(tmp_path / "store" / "small.mar")
    (tmp_path / "request.json").unlink()
    result = package(*arguments, "--force")
    assert result.exit_code == 1 and "names 'request.json': it is not in the archive" in result.output
    elsewhere = tmp_path / "elsewhere" / "request.json"
    elsewhere.parent.mkdir()
    elsewhere.write_text("[[1, 2, 3, 4]]")
    assert package(*arguments, "--force", "--sample", elsewhere).exit_code == 0


@pytest.mark.parametrize("text", ["a: [", "handler: 3\n", "handler: {openvino: {warmup: {samples: 3}}}\n", "- 1\n"])
def test_a_configuration_that_is_not_valid_is_refused(sources: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "model-config.yaml").write_text(text)
    result = package(*options(sources, tmp_path / "store", config=tmp_path / "model-config.yaml"))
    assert result.exit_code == 1 and "error: " in result.output and "Traceback" not in result.output


def repacked(packed: Path, folder: Path) -> Path:
    extract(packed, folder)
    return folder


def started(archive: Path, folder: Path) -> dict[str, Any]:
    return loaded(repacked(archive, folder))


def loaded(folder: Path, **environment: str) -> dict[str, Any]:
    """Loads an unpacked archive in a separate process as a worker does, and returns the report."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torchserve_openvino.serving.torchserve.archive_loader",
        str(folder),
    ]
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("torchserve-openvino-loaded: "))
    return json.loads(line.partition(": ")[2])


def test_a_packaged_archive_starts_warm_and_right(packed: Path, tmp_path: Path) -> None:
    assert inspect(packed).start == "warm"
    report = started(packed, tmp_path / "worker")
    assert report["cache"]["status"] == "hit" and report["cache"]["calls"] == {"hits": 2, "misses": 0}
    assert (report["cache"]["traces"], report["cache"]["compiles"]) == (0, 0)
    assert report["summary"]["coverage"] == 1.0 and report["summary"]["fallbacks"] == 0
    assert report["verify"]["passed"] and report["cache"]["verified"]["signatures"] == 2


def test_check_tells_people_and_programs(packed: Path) -> None:
    result = package("--check", packed)
    assert result.exit_code == 0 and "starts warm here" in result.stdout
    answer = json.loads(package("--check", packed, "--json").stdout)
    assert answer["start"] == "warm" and answer["model"]["modelName"] == "small" and not answer["reasons"]


@pytest.mark.slow
def test_the_same_files_give_the_same_archive(packed: Path, sources: Path, tmp_path: Path) -> None:
    result = package(*options(sources, tmp_path), "--precompile", "--level", "sse4", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["archive"] == str(tmp_path / "small.mar")
    assert (tmp_path / "small.mar").read_bytes() == packed.read_bytes()


@pytest.mark.slow
def test_an_archive_of_plain_torch_model_archiver_still_starts_and_check_says_cold(
    sources: Path, tmp_path: Path
) -> None:
    handler = handlers()["tensor"]
    command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", "plain", "--version", "1"]
    command += ["--model-file", str(sources / "model.py"), "--serialized-file", str(sources / "weights.pth")]
    command += ["--config-file", str(sources / "model-config.yaml"), "--handler", str(handler)]
    subprocess.run([*command, "--export-path", str(tmp_path)], check=True, capture_output=True)
    result = package("--check", tmp_path / "plain.mar")
    assert result.exit_code == 1 and "no compiled graphs" in result.stdout
    report = started(tmp_path / "plain.mar", tmp_path / "worker")
    assert report["cache"]["status"] == "off" and report["verify"]["passed"]


@pytest.mark.slow
def test_other_weights_in_an_old_archive_are_found_and_never_served_stale(packed: Path, tmp_path: Path) -> None:
    folder = repacked(packed, tmp_path / "new")
    torch.manual_seed(7)
    other = {name: torch.randn_like(tensor) for name, tensor in encoder().state_dict().items()}
    torch.save(other, folder / "weights.pth")
    write(folder, tmp_path / "small.mar")
    verdict = inspect(tmp_path / "small.mar")
    assert verdict.start == "cold" and "weights.pth" in verdict.reasons[0]
    report = loaded(folder)
    assert report["cache"]["calls"]["hits"] == 0 and report["cache"]["nearest"].keys() == {"weights"}
    assert report["verify"]["passed"] and report["summary"]["coverage"] == 1.0


def test_other_versions_are_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = inspection.versions()
    monkeypatch.setattr(inspection, "versions", lambda: {**now, "openvino": "2031.1"})
    verdict = inspect(packed)
    assert verdict.start == "cold" and "openvino" in verdict.reasons[0] and "2031.1" in verdict.reasons[0]


@pytest.mark.slow
def test_another_cpu_starts_from_the_stored_ir_or_from_its_level(packed: Path, tmp_path: Path) -> None:
    folder = repacked(packed, tmp_path / "worker")
    # An SSE4 machine finds no blob for its own CPU in the archive, but one for its level.
    report = loaded(folder, ONEDNN_MAX_CPU_ISA="SSE41")
    assert report["cache"]["status"] == "hit" and report["cache"]["imports"] == 2
    shutil.rmtree(folder / PACKAGED_FOLDER / "entries" / "blob")
    report = loaded(folder)
    assert (report["cache"]["traces"], report["cache"]["compiles"]) == (0, 2)
    assert report["cache"]["status"] == "partial" and report["verify"]["passed"]
    write(folder, tmp_path / "small.mar")
    verdict = inspect(tmp_path / "small.mar")
    assert verdict.start == "from IR" and "not compiled for this machine" in verdict.reasons[0]


@pytest.mark.slow
def test_damage_is_named_and_survived(packed: Path, tmp_path: Path) -> None:
    folder = repacked(packed, tmp_path / "worker")
    for path in (folder / PACKAGED_FOLDER / "objects").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    write(folder, tmp_path / "small.mar")
    verdict = inspect(tmp_path / "small.mar")
    assert verdict.start == "cold" and verdict.reasons[0].startswith("damaged")
    report = loaded(folder)
    assert report["verify"]["passed"] and report["summary"]["coverage"] == 1.0


@pytest.mark.slow
def test_a_model_that_does_not_load_is_told_with_its_reason(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(ENCODER.replace("torch.nn.Linear(8, 3)", "torch.nn.Linear(9, 3)"))
    result = package(*options(sources, tmp_path, model=tmp_path / "model.py"), "--precompile")
    assert result.exit_code == 1 and "does not load" in result.stderr and "size mismatch" in result.stderr
    assert not (tmp_path / "small.mar").exists()


@pytest.mark.slow
def test_a_model_without_declared_inputs_can_not_be_precompiled(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("pt2: openvino\n")
    result = package(*options(sources, tmp_path, config=tmp_path / "model-config.yaml"), "--precompile")
    assert result.exit_code == 1 and "handler.openvino.warmup.inputs" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precompile", "--level", "avx1024"], "unknown CPU level 'avx1024'"),
        (["--level", "avx2"], "--level needs --precompile"),
        (["--handler", "nothing"], "unknown handler 'nothing'"),
    ],
)
def test_wrong_arguments(sources: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = package(*options(sources, tmp_path), *arguments)
    assert result.exit_code != 0 and words in " ".join(result.output.replace("│", " ").split())


def test_an_archive_is_not_replaced_unasked(packed: Path, sources: Path) -> None:
    before = packed.read_bytes()
    result = package(*options(sources, packed.parent))
    assert result.exit_code == 1 and "--force" in result.stderr and packed.read_bytes() == before


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/outside.txt"])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "bad.mar", "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(PackagingError, match="outside"):
        inspect(tmp_path / "bad.mar")


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "no.mar").write_text("not a zip")
    result = package("--check", tmp_path / "no.mar")
    assert result.exit_code == 1 and "cannot be read as a .mar" in result.stderr


def test_the_bundled_wheel_is_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path / "there"), str(wheel)], check=True, capture_output=True)
    code = "import torchserve_openvino, sys; print(torchserve_openvino.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert said.stdout.startswith(str(tmp_path / "there"))
    assert wheel.read_bytes() == build_wheel(tmp_path).read_bytes()


def test_the_wheel_of_sources_on_the_path_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PYTHONPATH` names sources that setuptools has described for an editable install."""
    found = tmp_path / "torchserve_openvino.egg-info"
    found.mkdir()
    (found / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: torchserve-openvino\nVersion: 7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        said = wheel.read("torchserve_openvino-7.0.dist-info/METADATA")
    assert said == (found / "PKG-INFO").read_bytes()


@pytest.mark.slow
def test_an_own_handler_is_told_why_it_starts_cold(sources: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from ts.torch_handler.base_handler import BaseHandler\nimport torchserve_openvino as tov\n"
        "class Mine(tov.OpenVINOHandler, BaseHandler):\n    pass\n"
    )
    made = package(*options(sources, tmp_path), "--handler", mine, "--precompile")
    assert made.exit_code == 0, made.output
    assert "starts cold" in made.output and "handler.openvino.freeze: true" in " ".join(made.output.split())
    verdict = inspect(tmp_path / "small.mar")
    assert verdict.start == "cold"
    (reason,) = verdict.reasons
    assert "handler of your own may change the weights" in reason and "graph breaks" not in reason


def _deadly(folder: Path, handler: str) -> list[object]:
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    torch.save({f"layers.{name}": value for name, value in linear.state_dict().items()}, folder / "w.pth")
    (folder / "deadly.py").write_text(deadly_model.MODEL)
    (folder / "handler.py").write_text(handler)
    warmup = "warmup: {inputs: [{name: x, shape: [64], dtype: float32}]}"
    (folder / "config.yaml").write_text(f"pt2: openvino\nhandler: {{openvino: {{freeze: true, {warmup}}}}}\n")
    return [
        *("--model-name", "deadly", "--model-file", folder / "deadly.py", "--serialized-file", folder / "w.pth"),
        *("--handler", folder / "handler.py", "--config-file", folder / "config.yaml", "--export-path", folder),
        "--precompile",
    ]


@pytest.mark.slow
def test_a_model_that_the_compiler_survives_without_fusion_is_packaged_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path / "state"))
    result = package(*_deadly(tmp_path, deadly_model.HANDLER))
    assert result.exit_code == 0, result.output
    assert "ended by SIGSEGV; the model is loaded again" in " ".join(result.output.split())
    assert inspect(tmp_path / "deadly.mar").start == "warm"
    with zipfile.ZipFile(tmp_path / "deadly.mar") as archive:
        assert not [name for name in archive.namelist() if "compiling" in name]


@pytest.mark.slow
def test_a_model_that_the_compiler_does_not_survive_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSERVE_OPENVINO_STATE_DIR", str(tmp_path / "state"))
    handler = deadly_model.HANDLER.replace("class", 'build.trial_of_model = lambda *arguments: "SIGFPE"\nclass')
    result = package(*_deadly(tmp_path, handler))
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and not (tmp_path / "deadly.mar").exists()
    assert "compiler died (SIGFPE) compiling graph 0 / openvino_0" in text and "doctor --bisect" in text


def test_files_of_one_name_are_refused(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    result = package(*options(sources, tmp_path / "store"), "--extra-files", tmp_path / "model.py")
    assert result.exit_code != 0 and "would be one file in the archive" in words(result.output)
    assert package(*options(sources, tmp_path / "store"), "--extra-files", sources / "model.py").exit_code == 0


def test_brackets_in_names_are_no_patterns_and_a_comma_is_refused(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "of [a] user*"
    folder.mkdir()
    (folder / "a[1].txt").write_text("a")
    result = package(*options(sources, tmp_path / "store"), "--extra-files", folder / "a[1].txt")
    assert result.exit_code == 0, result.output
    assert "a[1].txt" in names_in(tmp_path / "store" / "small.mar")
    (sources / "with, comma.json").write_text("[[1, 2, 3, 4]]")
    try:
        (tmp_path / "model-config.yaml").write_text(CONFIG)
        result = package(
            *options(sources, tmp_path / "other", config=tmp_path / "model-config.yaml"),
            "--sample", sources / "with, comma.json",
        )  # fmt: skip
        assert result.exit_code == 1 and "comma" in result.output
    finally:
        (sources / "with, comma.json").unlink()


def test_one_sample_as_text(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("[[1, 2, 3, 4]]")
    (tmp_path / "model-config.yaml").write_text(f"{CONFIG.rstrip()[:-1]}, samples: request.json}}\n")
    result = package(*options(sources, tmp_path / "store", config=tmp_path / "model-config.yaml"))
    assert result.exit_code == 0, result.output
    assert "request.json" in names_in(tmp_path / "store" / "small.mar")


def test_calibration_without_a_method_is_refused(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    result = package(*options(sources, tmp_path / "store"), "--calibration", tmp_path / "data")
    assert result.exit_code == 1 and "--calibration needs --quantize" in " ".join(result.output.split())


def test_a_file_that_the_yaml_names_takes_no_other_s_place(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    config = tmp_path / "model-config.yaml"
    config.write_text("handler: {openvino: {wrap: model.py}}\n")
    result = package(*options(sources, tmp_path / "store", config=config))
    assert result.exit_code != 0 and "would be one file in the archive" in words(result.output)


def test_a_tuned_archive_keeps_its_version(tmp_path: Path) -> None:
    result = package("--tuned", tmp_path, "--version", "2.0")
    assert result.exit_code != 0 and "--version and --tuned exclude each other" in words(result.output)
