"""`package --hf`: which files a Hugging Face folder gives to an archive, for which task, and what is refused."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hub_models import text_model
from hub_vision_models import vision_model
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cli import app
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.check_archive import check_archive
from torchserve_openvino.packaging.hub_model import check_loads, hub_model
from torchserve_openvino.serving.loading import hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model("token_classifier", tmp_path_factory.mktemp("hub") / "ner")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ner"))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def package(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["package", *map(str, arguments)])


def test_an_archive_without_code(saved: Path, tmp_path: Path) -> None:
    done = package("--hf", saved, "--export-path", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["task"] == "token_classifier" and "BertForTokenClassification" in made["task_from"]
    with zipfile.ZipFile(tmp_path / "ner.mar") as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]
    assert {"hub/config.json", "hub/model.safetensors", "hub/tokenizer.json", "token_classifier.py"} <= set(names)
    assert manifest["handler"] == "token_classifier.py" and "modelFile" not in manifest
    assert check_archive(tmp_path / "ner.mar", check_device=True).problems == []


def test_safetensors_are_preferred_and_code_is_left_out(folder: Path) -> None:
    stray = {"consolidated.safetensors", "model.fp16.safetensors", "model-00001-of-00002.safetensors"}
    for name in ("pytorch_model.bin", "modeling_own.py", "README.md", "flax_model.msgpack", "tf_model.h5", *stray):
        (folder / name).write_bytes(b"x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"x")
    names = {str(path) for path in hub_model(folder, None).files}
    assert "model.safetensors" in names and "config.json" in names
    assert names.isdisjoint(
        stray | {"pytorch_model.bin", "modeling_own.py", "README.md", "tf_model.h5", "onnx/model.onnx"}
    )


def test_a_state_dict_is_taken_where_there_is_nothing_else(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model = hub_model(folder, None)
    assert Path("pytorch_model.bin") in model.files
    assert check_loads(model) == "BertForTokenClassification"


def test_pickled_code_in_weights_does_not_run(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(PackagingError):
        check_loads(hub_model(folder, None))
    assert not (tmp_path / "ran").exists()


def test_a_folder_for_image_classifier_gets_the_handler_with_its_own_transforms(tmp_path: Path) -> None:
    saved = vision_model("hub_image_classifier", tmp_path / "saved")
    assert hub_model(saved, "image_classifier").task.handler == "hub_image_classifier"
    assert hub_model(saved, None).task.handler == "hub_image_classifier"


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        ({"auto_map": {"AutoModel": "own.Own"}}, None, r"auto_map.*never run"),
        ({"architectures": ["BertForDancing"]}, None, r"no task .* BertForDancing\. Name it: --task"),
        ({"architectures": None}, None, "names no architecture"),
        ({}, "token-clasification", "Did you mean 'token-classification'"),
        ({}, "tensor", "unknown task 'tensor'"),
    ],
)
def test_what_cannot_be_packaged_says_why(folder: Path, changes: dict, task: str | None, message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(PackagingError, match=message):
        hub_model(folder, task)


@pytest.mark.parametrize(("name", "message"), [("model.safetensors", "no weights"), ("config.json", "no config.json")])
def test_a_missing_file_is_named(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(PackagingError, match=message):
        hub_model(folder, None)


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(PackagingError, match="tokenizer"):
        check_loads(hub_model(folder, None))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    configure(folder, intermediate_size=64)
    with pytest.raises(PackagingError, match="another shape"):
        check_loads(hub_model(folder, None))


@pytest.mark.parametrize(
    "arguments", [("--handler", "tensor"), ("--serialized-file", "{folder}/config.json")], ids=["handler", "weights"]
)
def test_options_that_exclude_each_other(folder: Path, arguments: tuple[str, ...]) -> None:
    done = package("--hf", folder, *(each.format(folder=folder) for each in arguments))
    assert done.exit_code == 2 and "exclude each other" in " ".join(done.output.split())


def test_a_task_needs_a_folder() -> None:
    done = package("--model-name", "x", "--task", "reranker")
    assert done.exit_code == 2 and "--task needs --hf" in " ".join(done.output.split())


def test_an_archive_whose_folder_is_missing_fails_its_check(saved: Path, tmp_path: Path) -> None:
    done = package("--model-name", "x", "--handler", "reranker", "--export-path", tmp_path)
    assert done.exit_code == 1 and "package --hf FOLDER" in " ".join(done.output.split())


def test_a_wrapped_handler_comes_along(tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text("handler: {openvino: {wrap: mine.py}}\n")
    arguments = ("--model-name", "x", "--config-file", config, "--export-path", tmp_path)
    done = package(*arguments)
    assert done.exit_code == 1 and "mine.py in handler.openvino.wrap: file not found" in " ".join(done.output.split())
    (tmp_path / "mine.py").write_text("class A:\n    pass\n")
    assert package(*arguments).exit_code == 0
    with zipfile.ZipFile(tmp_path / "x.mar") as archive:
        assert "mine.py" in archive.namelist()
    # One of TorchServe's is installed with it.
    config.write_text("handler: {openvino: {wrap: image_segmenter}}\n")
    done = package(*arguments, "--force")
    assert done.exit_code == 0, done.output


def test_the_cache_knows_a_model_in_another_folder(folder: Path, tmp_path: Path) -> None:
    """Each registration unpacks an archive into a folder of its own."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    first, second = (fingerprint(hub.load_model(each, "AutoModelForTokenClassification")) for each in (folder, other))
    assert first == second and first.unknown == ()


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "notes.txt").symlink_to(secret)
    with pytest.raises(PackagingError, match=r"notes\.txt.*leads out of its folder.*secret\.txt"):
        hub_model(folder, None)
    (folder / "notes.txt").unlink()
    (folder / "1_Pooling").symlink_to(tmp_path)
    (tmp_path / "key.json").write_text("{}")
    (folder / "modules.json").write_text(json.dumps([{"type": "models.Pooling", "path": "1_Pooling"}]))
    with pytest.raises(PackagingError, match=r"1_Pooling"):
        hub_model(folder, None)


def test_links_of_the_hubs_own_cache_are_followed(saved: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--me--ner"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(saved, repository / "blobs")
    for path in (repository / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert Path("model.safetensors") in hub_model(snapshot, None).files
    (snapshot / "part").mkdir()
    for path in (repository / "blobs").iterdir():
        (snapshot / "part" / path.name).symlink_to(Path("../../../blobs") / path.name)
    assert Path("model.safetensors") in hub_model(snapshot / "part", None).files
    other = tmp_path / "models--you--ner" / "blobs"
    shutil.copytree(saved, other)
    (snapshot / "vocab.txt").unlink(missing_ok=True)
    (snapshot / "vocab.txt").symlink_to(other / "config.json")
    with pytest.raises(PackagingError, match=r"vocab\.txt"):
        hub_model(snapshot, None)


def test_an_index_of_files_that_are_not_packaged_stays_behind(folder: Path) -> None:
    from safetensors.torch import load_file

    for name, shard in (("model.safetensors", "model-1-of-1.safetensors"), ("pytorch_model.bin", "x.bin")):
        (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": shard}}))
    names = {str(path) for path in hub_model(folder, None).files}
    assert "model.safetensors" in names and not [name for name in names if name.endswith(".index.json")]
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    keys = dict.fromkeys(load_file(folder / "model-1-of-1.safetensors"), "model-1-of-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": keys}))
    names = {str(path) for path in hub_model(folder, None).files}
    assert {"model-1-of-1.safetensors", "model.safetensors.index.json"} <= names
    assert "pytorch_model.bin.index.json" not in names
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(PackagingError, match=r"model\.safetensors\.index\.json is damaged"):
        hub_model(folder, None)
