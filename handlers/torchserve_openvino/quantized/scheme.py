"""What ``quantization_config`` of a config.json says: the format of the packed layers, and what is not supported.

The fields are those that transformers, AutoGPTQ, GPTQModel and AutoAWQ write.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from torchserve_openvino.errors import ModelLoadError

SECTION = "quantization_config"
_BITS = {"gptq": (4, 8), "awq": (4,)}
_GROUP_SIZE = 128
# From this version on GPTQModel packs zero points as they are, and subtracts 1 from whole words for the first format.
_BY_WORDS = Version("0.9.0")


@dataclass(frozen=True)
class Scheme:
    """How the linear layers of a checkpoint are packed.

    Attributes:
        method: Who packed them.
        bits: Bits of a weight, and of a zero point.
        group_size: How many weights of a row share a scale and a zero point; -1 for the whole row.
        less_one: Whether a stored zero point is one less than the true one (GPTQ's first format).
        by_words: Whether that one was subtracted from words of 32 bits, with borrow from zero point to zero point.
        may_lack_zeros: Whether a layer without zero points is symmetric around the middle of its range.
    """

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int
    less_one: bool = False
    by_words: bool = False
    may_lack_zeros: bool = False

    @property
    def name(self) -> str:
        """The format's name in reports, such as ``gptq-int4``."""
        return f"{self.method}-int{self.bits}"


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Reads a model's configuration.

    Args:
        config: The content of config.json.

    Returns:
        None for a model that is not quantized.

    Raises:
        ModelLoadError: The method, a field or a combination is not supported; the message names field and value.
    """
    section = config.get(SECTION)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ModelLoadError(f"config.json: {SECTION} is {section!r}, not an object.")
    method = _one_of(section, "quant_method", tuple(_BITS))
    bits = _one_of(section, "bits", _BITS[method], default=4 if method == "awq" else None)
    group_size = section.get("group_size", _GROUP_SIZE)
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise _unsupported("group_size", group_size, "-1 for whole rows, or at least 1")
    for field, value, supported in _unknown_extras(section):
        raise _unsupported(field, value, supported)
    if method == "awq":
        _format(section, ("version", "format", "checkpoint_format"), ("gemm",))
        return Scheme("awq", bits, group_size, may_lack_zeros=section.get("zero_point") is False)
    first = _format(section, ("checkpoint_format", "format"), ("gptq", "gptq_v2")) == "gptq"
    return Scheme("gptq", bits, group_size, less_one=first, by_words=first and _is_of_gptqmodel(section))


def _one_of(section: Mapping[str, Any], field: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    value = section.get(field, default)
    value = value.lower() if isinstance(value, str) else value
    # True equals 1, and 4.0 equals 4.
    if not any(value == choice and type(value) is type(choice) for choice in supported):
        raise _unsupported(field, value, ", ".join(map(str, supported)))
    return value


def _format(section: Mapping[str, Any], fields: tuple[str, ...], supported: tuple[str, ...]) -> str:
    """Returns the layout of the packed tensors, which writers name in one of several fields or in all of them."""
    formats = {field: section[field] for field in fields if section.get(field) is not None}
    for field in formats:
        _one_of(section, field, supported)
    if len({str(value).lower() for value in formats.values()}) > 1:
        raise ModelLoadError(f"config.json: {SECTION} names two formats: {formats}. Keep the right one.")
    return str(next(iter(formats.values()), supported[0])).lower()


def _unknown_extras(section: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields fields that change what the packed numbers mean, where they ask for something that is not supported."""
    if section.get("is_marlin_format"):
        yield "is_marlin_format", True, "false"
    if section.get("backend") == "llm-awq":
        yield "backend", "llm-awq", "AutoAWQ's order (version: gemm)"
    if section.get("pack_dtype") not in {None, "int32", "torch.int32"}:
        yield "pack_dtype", section["pack_dtype"], "int32"
    if section.get("adapter"):
        yield "adapter", section["adapter"], "none; merge it into the weights"
    rules = section.get("dynamic") or {}
    # A rule that begins with "-:" leaves layers as they are; others change bits or group size.
    if not isinstance(rules, Mapping) or any(not str(rule).startswith("-:") for rule in rules):
        yield "dynamic", rules, "rules that begin with '-:'; all packed layers have the same bits and group size"


def _is_of_gptqmodel(section: Mapping[str, Any]) -> bool:
    meta = section.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for writer in writers if isinstance(writers, list) else [writers]:
        name, _, version = str(writer).partition(":")
        try:
            if name == "gptqmodel" and Version(version) >= _BY_WORDS:
                return True
        except InvalidVersion:
            continue
    return False


def _unsupported(field: str, value: Any, supported: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {SECTION}.{field} is {value!r}; supported: {supported}.")
