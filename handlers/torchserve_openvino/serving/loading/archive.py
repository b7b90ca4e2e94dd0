"""Loads an unpacked model archive as TorchServe's worker does and prints the report: ``python -m ... FOLDER``."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.torchserve_keys import check_torchserve_keys
from torchserve_openvino.config.yaml_source import Source, read_yaml
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.files.json_text import JsonError, read_json_object
from torchserve_openvino.report.quiet import quiet_libraries

# The file in which torch-model-archiver stores its arguments.
MANIFEST = "MAR-INF/MANIFEST.json"
# What `package --quantize` made and compared.
QUANTIZED = "quantized.json"
QUANTIZED_MODEL = "quantized.pt2"
# Keys of a manifest that name files of the archive.
_FILES = ("configFile", "handler", "modelFile", "serializedFile")
# Prefix of the line with the report.
RESULT = "torchserve-openvino-loaded: "


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
    """Whether an unpacked archive holds a quantised model."""
    return (model_dir / QUANTIZED).is_file()


def has_f32(model_dir: Path) -> bool:
    """Whether an unpacked archive holds the weights in f32: one that is not quantised, or that keeps them beside."""
    return not is_quantized(model_dir) or bool(facts_of(model_dir).get("keeps_f32"))


def not_quantized(model_dir: Path, config: ServingConfig) -> str:
    """Returns why an unpacked archive is not what its YAML says; empty if it is."""
    method = config.openvino.quantize.method
    if method is None or is_quantized(model_dir):
        return ""
    return (
        f"handler.openvino.quantize.method is {method}, but the archive holds no quantised model: it is made by "
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


def load_handler(place: Path) -> Any:
    """Runs an archive's handler up to READY, with TorchServe's own loader.

    Args:
        place: The unpacked archive.

    Returns:
        The handler; None where the archive's handler is a plain function.
    """
    # Imported here, so that the names above can be used without TorchServe.
    from ts.model_loader import ModelLoaderFactory

    model = model_of(place)
    batch_size = 1
    if name := model.get("configFile"):
        batch_size = batch_size_of(read_yaml(place / name))
    sys.path.insert(0, str(place))
    handler = str(place / model["handler"]) if (place / model["handler"]).is_file() else model["handler"]
    service = ModelLoaderFactory.get_model_loader().load(model["modelName"], str(place), handler, None, batch_size)
    return getattr(service._entry_point, "__self__", None)


def load_without_server(place: Path) -> Any:
    """Runs an archive's handler up to READY, and lets it answer requests outside of any server.

    Args:
        place: The unpacked archive.

    Returns:
        The handler; None where the archive's handler is a plain function.
    """
    # Imported here, as in `load_handler`.
    import ts
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    handler = load_handler(place)
    if handler is not None:
        metrics = Path(ts.__file__).parent / "configs" / "metrics.yaml"
        handler.context.metrics = MetricsCacheYamlImpl(config_file_path=str(metrics))
    return handler


def main(folder: str) -> None:
    """Loads an archive and prints the report of its handler.

    Args:
        folder: The unpacked archive.

    Raises:
        SystemExit: The archive's handler is not one of this package's.
    """
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    describe = getattr(load_handler(Path(folder)), "describe_handle", None)
    report = describe() if describe is not None else {}
    if not isinstance(report, dict) or "cache" not in report:
        raise SystemExit("the archive's handler is not one of torchserve-openvino's: nothing is compiled for it")
    shown = {name: report[name] for name in ("cache", "summary", "verify", "serving", "fallbacks")}
    print(RESULT + json.dumps(shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
