"""Compresses the weights of an exported language model to 8 or 4 bits."""

import logging
from typing import Any

import openvino as ov

from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.quantized.scheme import SECTION, Scheme

_GROUPS = (64, 32, 16)


def compressed(model: ov.Model, weights: str, group_size: int | None) -> tuple[ov.Model, dict[str, Any]]:
    """Compresses the weights of linear layers and embeddings, symmetrically around 0.

    ``int8`` has a scale for each row. ``int4`` has one for each group of a row; embeddings and the last layer stay in
    8 bits, as NNCF recommends.

    Args:
        model: Changed where its format is compressed.
        weights: The format, as `format_of` gives it.
        group_size: `generate.group_size`.

    Returns:
        The model, and what was chosen, for the report.

    Raises:
        ModelLoadError: NNCF is not installed, or refuses the model or the group size.
    """
    if weights not in COMPRESSED:
        return model, {}
    try:
        # Imported here: it takes seconds, which only a cold start with compressed weights needs.
        import nncf
    except ImportError as error:
        raise ModelLoadError(
            f"generate.weights: {weights} needs nncf ({error}): pip install 'torchserve-openvino[quantize]'."
        ) from error
    nncf.set_log_level(logging.WARNING)
    if weights == "int8":
        mode, options = nncf.CompressWeightsMode.INT8_SYM, {}
    else:
        size = group_size if group_size is not None else _group_for(model)
        mode, options = nncf.CompressWeightsMode.INT4_SYM, {"group_size": size, "ratio": 1.0}
    try:
        return nncf.compress_weights(model, mode=mode, **options), options
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"nncf cannot compress the weights to {weights} ({options}): {error}") from error


def _group_for(model: ov.Model) -> int:
    """Returns the largest usual group that divides the rows of all linear layers; -1, whole rows, if none does."""
    rows = []
    for operation in model.get_ops():
        if operation.get_type_name() == "MatMul":
            weight = operation.input(1).get_source_output()
            shape = weight.get_partial_shape()
            if shape.is_static and len(shape) == 2:
                by_row = operation.get_attributes().get("transpose_b", False)
                rows.append(shape[1 if by_row else 0].get_length())
    return next((size for size in _GROUPS if rows and all(row % size == 0 for row in rows)), -1)


# --- which format the weights of an exported model have: that of the configuration, or the checkpoint's own -------


COMPRESSED = ("int8", "int4")


def dequantized(computation: str, scheme: Scheme | None) -> str:
    """Returns the format of weights in the precision of computation, as reports name it where they were packed."""
    return computation if scheme is None else f"{computation} (dequantized {scheme.name})"


def format_of(section: GenerateSection, scheme: Scheme | None) -> str:
    """Returns ``f32``, ``bf16``, ``int8``, ``int4``, or a packed checkpoint's own format, such as ``gptq-int4``.

    Args:
        section: `handler.openvino.generate`.
        scheme: How the checkpoint is packed; None if it is not.

    Raises:
        ConfigError: Weights that are packed already should be packed again.
    """
    if scheme is None:
        return "f32" if section.weights == "auto" else section.weights
    if section.weights in COMPRESSED:
        raise ConfigError(
            f"is {section.weights}, but the model's weights have {scheme.bits} bits already ({SECTION}.quant_method: "
            f"{scheme.method}), and would be rounded twice. Set auto to keep them as they are, or f32 to dequantize "
            "them.",
            key="handler.openvino.generate.weights",
        )
    return scheme.name if section.weights == "auto" else section.weights
