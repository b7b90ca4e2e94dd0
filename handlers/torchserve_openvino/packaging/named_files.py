"""Finds the files beside a model-config.yaml that it names, so that `package` adds them to the archive."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchserve_openvino.config.fields import is_handler_file
from torchserve_openvino.config.yaml_source import openvino_section, read_yaml
from torchserve_openvino.errors import ConfigError, PackagingError


def files_named_by(config_file: Path) -> list[Path]:
    """Returns the files of ``op_mappings``, ``record.scrub``, ``wrap`` and ``warmup.samples``.

    A sample that is not there is left out: it may come from elsewhere, and the check of the archive demands it.

    Args:
        config_file: A model-config.yaml. One that is not valid names nothing: the check of the archive says why.

    Raises:
        PackagingError: One of the others is not there.
    """
    # Imported here: it imports torch.
    from torchserve_openvino.serving.loading.op_mappings import mapping_files

    try:
        document = read_yaml(config_file).data
    except ConfigError:
        return []
    section = openvino_section(document)
    named = [("op_mappings", name) for name in mapping_files(document)]
    wrapped = section.get("wrap")
    scrub = _mapping(section.get("record")).get("scrub")
    named += [("record.scrub", scrub)] if isinstance(scrub, str) else []
    named += [("wrap", wrapped)] if isinstance(wrapped, str) and is_handler_file(wrapped) else []
    for key, name in named:
        if not (config_file.parent / name).is_file():
            raise PackagingError(
                f"{config_file} names {name} in handler.openvino.{key}: file not found: {config_file.parent / name}."
            )
    samples = _mapping(section.get("warmup")).get("samples")
    # The archive has one folder: a sample in another one has another name there.
    names = [name for name in samples if name == Path(str(name)).name] if isinstance(samples, list) else []
    paths = [config_file.parent / name for _, name in named] + [config_file.parent / name for name in names]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
