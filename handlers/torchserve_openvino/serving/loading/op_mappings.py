"""Loads the operator mappings that an archive contains."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.config.yaml_source import openvino_section
from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.ops.mappings import load_mappings

logger = logging.getLogger(__name__)


def load_archived_mappings(model_dir: Path, document: Mapping[str, Any] | None) -> None:
    """Loads the files that ``handler.openvino.op_mappings`` names.

    This has to run before the rest of the configuration is read, which may name operators that these files define.

    Args:
        model_dir: The unpacked archive.
        document: The model-config.yaml as TorchServe read it; `load_serving_config` reports problems in it later.

    Raises:
        OpMappingError: A file is missing, leads out of the archive, or fails.
    """
    for name in mapping_files(document):
        try:
            file = contained(model_dir, name)
        except OutsideError as error:
            raise OpMappingError(f"handler.openvino.op_mappings: {error}.") from error
        load_mappings(file)
        logger.info("Operator mappings loaded from %s", name)


def mapping_files(document: Mapping[str, Any] | None) -> list[str]:
    """Returns the names in ``handler.openvino.op_mappings`` of a model-config.yaml; none if they cannot be read."""
    section = openvino_section(document)
    if not section.get("op_mappings"):
        return []
    try:
        return OpenVINOSection(op_mappings=section["op_mappings"]).op_mappings
    except ValidationError:
        # `load_serving_config` reports it with the line.
        return []
