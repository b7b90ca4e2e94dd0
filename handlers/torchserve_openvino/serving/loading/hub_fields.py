"""The fields of a Hugging Face config.json that this package reads itself, and their types."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from torchserve_openvino.errors import ModelLoadError


class _Fields(BaseModel):
    # transformers checks all others.
    model_config = ConfigDict(strict=True, extra="allow")

    architectures: list[str] | None = None
    model_type: str | None = None
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None
    is_encoder_decoder: bool | None = None
    auto_map: dict[str, Any] | None = None


def check_fields(config: Mapping[str, Any], path: Path) -> None:
    """Checks the content of a config.json.

    Args:
        config: The content.
        path: The file, for messages.

    Raises:
        ModelLoadError: A field has another type; the message names it.
    """
    try:
        _Fields.model_validate(dict(config))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}, not {each['input']!r:.100}" for each in error.errors()
        )
        raise ModelLoadError(f"{path} is not valid: {wrong}.") from error
