"""Which format the weights of an exported model have: that of the configuration, or the checkpoint's own."""

from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.quantized.scheme import SECTION, Scheme

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
