"""What an unpacked model archive says of itself: its manifest, its files, and how it was quantized."""

from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.torchserve_keys import check_torchserve_keys
from torchserve_openvino.config.yaml_source import Source
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.files.json_text import JsonError, read_json_object

# The file in which torch-model-archiver stores its arguments.
MANIFEST = "MAR-INF/MANIFEST.json"
# What `package --quantize` made and compared.
QUANTIZED = "quantized.json"
QUANTIZED_MODEL = "quantized.pt2"
# Keys of a manifest that name files of the archive.
_FILES = ("configFile", "handler", "modelFile", "serializedFile")


def model_of(folder: Path) -> dict[str, Any]:
    """Returns the section ``model`` of an unpacked archive's manifest.

    Raises:
        ModelLoadError: The manifest can't be read, or names files outside the archive.
    """
    try:
        return named_files(read_json_object(folder / MANIFEST), folder)
    except (OSError, JsonError) as error:
        raise ModelLoadError(f"{MANIFEST} cannot be read: {error}.") from error


def named_files(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the section ``model`` of a manifest, whose files are in the folder, as far as they exist.

    Raises:
        ModelLoadError: There is no such section, or it names files outside the folder.
    """
    model = manifest.get("model", {})
    if not isinstance(model, dict):
        raise ModelLoadError(f"{MANIFEST}: model must be a JSON object, not {model!r:.100}.")
    for key in ("modelName", *_FILES):
        name = model.get(key)
        if name is not None and not isinstance(name, str):
            raise ModelLoadError(f"{MANIFEST}: model.{key} must be text, not {name!r:.100}.")
        if name and key in _FILES:
            try:
                # A handler may be a file and a function in it.
                contained(folder, name.partition(":")[0] if key == "handler" else name)
            except OutsideError as error:
                raise ModelLoadError(f"{MANIFEST}: model.{key}: {error}.") from error
    return model


def is_quantized(model_dir: Path) -> bool:
    """Whether an unpacked archive holds a quantized model."""
    return (model_dir / QUANTIZED).is_file()


def has_f32(model_dir: Path) -> bool:
    """Whether an unpacked archive holds the weights in f32: one that is not quantized, or that keeps them beside."""
    return not is_quantized(model_dir) or bool(facts_of(model_dir).get("keeps_f32"))


def not_quantized(model_dir: Path, config: ServingConfig) -> str:
    """Returns why an unpacked archive is not what its YAML says; empty if it is."""
    method = config.openvino.quantize.method
    if method is None or is_quantized(model_dir):
        return ""
    return (
        f"handler.openvino.quantize.method is {method}, but the archive holds no quantized model: it is made by "
        "`torchserve-openvino package`, not at load. Package it with that command, or remove the key"
    )


def facts_of(model_dir: Path) -> dict[str, Any]:
    """Returns what was made and compared when the archive was packaged.

    Raises:
        ModelLoadError: The file can't be read.
    """
    try:
        return read_json_object(model_dir / QUANTIZED, allow_nan=True)
    except (OSError, JsonError) as error:
        raise ModelLoadError(f"{QUANTIZED} cannot be read: {error}.") from error


def batch_size_of(source: Source) -> int:
    """Returns the key ``batchSize`` of a model-config.yaml. Raises ConfigError for one that TorchServe would ignore."""
    problems = source.problems()
    batch_size = check_torchserve_keys(source.data, problems).get("batchSize", 1)
    problems.raise_if_any(source.name)
    return int(batch_size)
