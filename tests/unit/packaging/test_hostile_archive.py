"""Archives that someone else made: whatever is in them, `check` says what is wrong, and unpacks nothing harmful."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.errors import ModelLoadError, PackagingError
from torchserve_openvino.hosts.model_settings import ModelSettings
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.serving.loading.files import archive_kind, read_samples
from torchserve_openvino.serving.loading.hub import load_model

DEEP, DIGITS, NAN = "[" * 50_000 + "]" * 50_000, "9" * 5_000, "NaN"
MODEL = {"modelName": "net", "modelFile": "model.py", "handler": "tensor.py", "configFile": "model-config.yaml"}
MANIFEST = "MAR-INF/MANIFEST.json"


def manifest(**changes: Any) -> str:
    return json.dumps({"model": {**MODEL, **changes}})


def packed(path: Path, members: dict[str, str | bytes]) -> Path:
    usual = {
        MANIFEST: manifest(), "model-config.yaml": "batchSize: 2\n", "model.py": "class Net:\n    pass\n",
        "tensor.py": "class Handler:\n    pass\n",
    }  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (usual | members).items():
            archive.writestr(name, content)
    return path


def check(path: Path) -> str:
    result = CliRunner().invoke(app, ["check", str(path)])
    # A traceback is another exception.
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


ZEROS = bytes(70 * 2**20)
TOO_DENSE: dict[str, Callable[[], dict[str, str | bytes]]] = {
    "one file": lambda: {"weights.bin": ZEROS},
    "all together": lambda: {f"{number}.bin": bytes(2**20) for number in range(70)},
    "the manifest": lambda: {MANIFEST: manifest() + " " * len(ZEROS)},
}


@pytest.mark.parametrize("kind", TOO_DENSE)
def test_what_inflates_too_much_is_not_unpacked(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "net.mar", TOO_DENSE[kind]())
    monkeypatch.setattr(zipfile.ZipFile, "extract", lambda *_: pytest.fail("unpacked"))
    assert "inflates from" in check(path) and "zip-store" in check(path)
    if kind == "the manifest":
        with pytest.raises(PackagingError, match="bytes, more than"):
            ModelSettings.of(path)


def test_weights_that_inflate_too_much_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights/data/0", ZEROS)
    with pytest.raises(ModelLoadError, match=r"weights\.pt is not read: 'weights/data/0' inflates"):
        archive_kind(path)
    path.rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is not read: 'weights/data/0' inflates"):
        load_model(tmp_path, "AutoModel")


def test_a_program_that_a_worker_refuses_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        for name in ("archive_format", "models/model.json", "data/aotinductor/model/net.so"):
            archive.writestr(f"net/{name}", "pt2")
        archive.writestr("net/.data/version", "6\n")
    model = json.dumps({"model": {"modelName": "net", "handler": "tensor.py", "serializedFile": "net.pt2"}})
    path = packed(tmp_path / "net.mar", {MANIFEST: model, "net.pt2": (tmp_path / "net.pt2").read_bytes()})
    assert "net.pt2: it holds 'data/aotinductor/model/net.so'" in check(path)


def test_zeros_that_are_stored_are_fine(tmp_path: Path) -> None:
    path = packed(tmp_path / "net.mar", {})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("weights.bin", ZEROS)
    extract(path, tmp_path / "net")
    assert (tmp_path / "net" / "weights.bin").stat().st_size == len(ZEROS)


def test_an_archive_larger_than_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "net.mar", {})
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3}))
    assert "has room for 3" in check(path)


MEMBERS: dict[str, tuple[dict[str, str | bytes], str]] = {
    "manifest deep": ({MANIFEST: DEEP}, "nested too deeply"),
    "manifest digits": ({MANIFEST: f'{{"model": {DIGITS}}}'}, "too many digits"),
    "manifest list": ({MANIFEST: "[]"}, "must hold a JSON object"),
    "manifest other model": ({MANIFEST: '{"model": []}'}, "model must be a JSON object"),
    "manifest number": ({MANIFEST: manifest(handler=5)}, "model.handler must be text"),
    "configuration outside": ({MANIFEST: manifest(configFile="../../x.yaml")}, "leads out of its folder"),
    "model outside": ({MANIFEST: manifest(modelFile="/etc/passwd")}, "leads out of its folder"),
    "weights outside": ({MANIFEST: manifest(serializedFile="a/../../b")}, "leads out of its folder"),
    "handler outside": ({MANIFEST: manifest(handler="../tensor.py:handle")}, "leads out of its folder"),
    "model large": ({"model.py": b"#" * 2**23 + bytes(range(256)) * 9}, "is no Python file"),
    "model deep": ({"model.py": DEEP}, "too many nested parentheses"),
    "handler deep": ({"tensor.py": "-" * 100_000 + "1"}, "is nested too deeply"),
    "yaml deep": ({"model-config.yaml": f"handler: {DEEP}"}, "nested too deeply"),
    "yaml digits": ({"model-config.yaml": f"batchSize: {DIGITS}"}, "a value that cannot be read"),
    "yaml date": ({"model-config.yaml": "handler: {since: 2026-99-99}"}, "a value that cannot be read"),
    "yaml large": ({"model-config.yaml": "a" * 5 * 2**20}, "larger than 4 MiB"),
    "yaml aliases": (
        {"model-config.yaml": "handler:\n  a0: &a0 [1]\n"
         + "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))},
        "aliases counted",
    ),
    "yaml nan": ({"model-config.yaml": "handler: {openvino: {fallback: {min_coverage: .nan}}}"}, "min_coverage"),
    "yaml infinite": ({"model-config.yaml": "handler: {openvino: {verify: {max_abs: .inf}}}"}, "max_abs"),
    "samples outside": (
        {"model-config.yaml": "handler: {openvino: {warmup: {samples: [../x.json]}}}"},
        "must name files of the archive",
    ),
    "samples absolute": (
        {"model-config.yaml": "handler: {openvino: {warmup: {samples: [/etc/passwd]}}}"},
        "must name files of the archive",
    ),
    "labels deep": ({"index_to_name.json": DEEP}, "index_to_name.json is not valid JSON: it is nested too deeply"),
    "labels digits": ({"index_to_name.json": f"[{DIGITS}]"}, "too many digits"),
    "labels number": ({"index_to_name.json": '{"0": 5}'}, "neither a name nor a list"),
}  # fmt: skip


@pytest.mark.quick(
    kind=["manifest deep", "handler deep", "configuration outside", "yaml deep", "yaml digits", "yaml aliases"]
)
@pytest.mark.parametrize("kind", MEMBERS)
def test_odd_content_is_named(tmp_path: Path, kind: str) -> None:
    members, message = MEMBERS[kind]
    path = packed(tmp_path / "net.mar", members)
    assert message in check(path)
    if MANIFEST in members:
        for read in (ModelSettings.of, lambda path: extract(path, tmp_path / "net")):
            with pytest.raises(PackagingError, match=message):
                read(path)


CONFIGS: dict[str, tuple[str, str]] = {
    "deep": (f'{{"model_type": {DEEP}}}', "nested too deeply"),
    "digits": (f'{{"vocab_size": {DIGITS}}}', "too many digits"),
    "nan": ('{"vocab_size": NaN}', "it holds NaN"),
    "list": ("[]", "must hold a JSON object"),
    "architectures": ('{"architectures": 5}', "architectures: Input should be a valid list, not 5"),
    "labels": ('{"architectures": ["X"], "id2label": "a"}', "id2label: Input should be a valid dictionary, not 'a'"),
    "type": ('{"architectures": ["X"], "model_type": ["bert"]}', "model_type: Input should be a valid string"),
}


@pytest.mark.quick(kind=["deep", "nan", "architectures"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_odd_config_json_is_named(tmp_path: Path, kind: str) -> None:
    content, message = CONFIGS[kind]
    hub = {
        MANIFEST: json.dumps({"model": {"modelName": "net", "handler": "text_classifier"}}),
        "hub/config.json": content,
    }
    assert message in check(packed(tmp_path / "net.mar", hub))
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["package", "--hf", str(folder), "--export-path", str(tmp_path)])
    assert isinstance(result.exception, SystemExit) and message in " ".join(result.output.split())


def test_samples_stay_in_the_archive(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "archive"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "good").write_text("1")
    (folder / "inner").symlink_to("good")
    assert read_samples(folder, ["good", "inner"]) == [("good", b"1"), ("inner", b"1")]
    for name in ("link", "loop", "../secret", str(tmp_path / "secret"), "a\0b"):
        with pytest.raises(ModelLoadError, match=r"warmup\.samples: "):
            read_samples(folder, [name])


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py", "a\\..\\outside.py", "link"])
def test_links_and_paths_outside_are_not_unpacked(tmp_path: Path, name: str) -> None:
    member = zipfile.ZipInfo(name)
    if name == "link":
        member.external_attr = 0o120777 << 16
    path = packed(tmp_path / "net.mar", {})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(member, "/etc/passwd")
    folder = tmp_path / "in" / "archive"
    with pytest.raises(PackagingError, match="which is a link, or a path outside the archive"):
        extract(path, folder)
    assert "a link, or a path outside" in check(path)
    assert not list(tmp_path.rglob("outside.py")) and not (folder / "link").exists()
