"""Inputs of a diagnosis: given on the command line or declared in the YAML, filled with random values."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.sections.handler import WarmupInput
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.serving.shapes.input_spec import Inputs, InputSpec, Signature, declared_specs, parameter_names
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs

# name=1,3,224,224:float32:0..1; all but the shape is optional.
_INPUT = re.compile(
    r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d+(?:,\d+)*)"
    r"(?::(?P<dtype>[a-z]\w*))?(?::(?P<low>-?[\d.]+)\.\.(?P<high>-?[\d.]+))?$"
)
HELP = "[NAME=]SHAPE[:DTYPE][:LOW..HIGH], such as 1,3,224,224 or ids=1,128:int64:0..30522 (HIGH is exclusive)"


def parse_input(text: str, generator: torch.Generator) -> tuple[str | None, torch.Tensor]:
    """Parses one input of the command line, batch dimension included.

    Args:
        text: ``[NAME=]SHAPE[:DTYPE][:LOW..HIGH]``; ``scalar`` is the shape of a tensor without dimensions.
        generator: Generator of the random values.

    Returns:
        The keyword (None for a positional input) and the tensor.

    Raises:
        ConfigError: The text is not of this form, or LOW is not less than HIGH.
    """
    match = _INPUT.match(text.replace(" ", ""))
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{text!r} is not an input; write {HELP}.", key="--input")
    scalar = match["shape"] == "scalar"
    sizes = (1,) if scalar else tuple(map(int, match["shape"].split(",")))
    spec = InputSpec(
        name=match["name"] or "input",
        keyword=match["name"] is not None,
        shape=sizes[1:],
        dtype=dtype,
        low=float(match["low"]) if match["low"] else None,
        high=float(match["high"]) if match["high"] else None,
    )
    if spec.low is not None and spec.high is not None and spec.low >= spec.high:
        raise ConfigError(f"{text!r}: {match['low']} must be less than {match['high']}.", key="--input")
    values = spec.make(Signature(sizes[0]), generator)
    return match["name"], values[0] if scalar else values


def parse_inputs(texts: Sequence[str]) -> Inputs:
    """Parses all inputs of the command line; every run gets the same values."""
    generator = torch.Generator().manual_seed(0)
    parsed = [parse_input(text, generator) for text in texts]
    return tuple(value for name, value in parsed if name is None), {name: value for name, value in parsed if name}


def declared_inputs(model: Any, declared: Sequence[WarmupInput], config: ServingConfig) -> Inputs | None:
    """Makes a batch of one as ``handler.openvino.warmup.inputs`` declares it, named dimensions at their largest length.

    Args:
        model: The eager model, for the names of its arguments.
        declared: One entry for each input; if there is none, None is returned.
        config: The settings that the entries belong to.
    """
    if not declared:
        return None
    dims = config.openvino.batching.dims
    largest = {name: sizes[-1] for name, sizes in dims.items()}
    names = parameter_names(model)
    return DeclaredInputs(declared_specs(declared, names), names, dims).make(Signature(1, largest))
