"""Describes what is compiled, so that a later process recognizes it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import openvino as ov
import torch
from blake3 import blake3

from torchserve_openvino.cache.identity.key import digest
from torchserve_openvino.config.cores import allowed_cores

# Operators in a description.
_SHOWN = 8
# Properties on which no kernel depends.
_ELSEWHERE = frozenset({"CACHE_DIR", "LOG_LEVEL"})


@dataclass(frozen=True)
class Subject:
    """A model that is compiled.

    Attributes:
        identity: Digest of the model's structure, device, configuration, versions and hardware.
        name: Where the report shows it, such as ``graph 0 / openvino_0``.
        operators: Types of its operators, with counts.
    """

    identity: str
    name: str
    operators: Mapping[str, int] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Its name and most frequent operators, on one line."""
        most = sorted(self.operators.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{count}x {kind}" for kind, count in most[:_SHOWN])
        more = " and others" if len(most) > _SHOWN else ""
        return f"{self.name} ({names}{more})" if names else self.name


def subject_of_model(
    model: ov.Model, name: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Subject:
    """Describes a model; takes 10 to 20 us for each of its operators.

    The compiler chooses kernels by operators, types and sizes, so the values of weights are no part of it. Types and
    sizes follow from those of inputs and weights.
    """
    operators = Counter[str]()
    structure = blake3("\n".join(_structure(model, operators)).encode()).hexdigest()
    for plain in ("Constant", "Parameter", "Result"):
        del operators[plain]
    return Subject(_identity(structure, device, config, hardware), name, dict(operators))


def subject_of_blob(
    content: str, name: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Subject:
    """Describes a compiled model by the digest of its content."""
    return Subject(_identity(f"blob {content}", device, config, hardware), name)


def _structure(model: ov.Model, operators: Counter[str]) -> Iterator[str]:
    position: dict[str, int] = {}
    for number, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        operators[kind] += 1
        position[node.get_name()] = number
        sources = [(position[value.get_node().get_name()], value.get_index()) for value in node.input_values()]
        # The attributes of inputs and weights are their types and sizes.
        yield f"{kind} {sources} {node.get_attributes()}"


def _identity(structure: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    return digest({
        "structure": structure,
        "device": device,
        "config": {name: str(value) for name, value in config.items() if name not in _ELSEWHERE},
        "hardware": hardware,
        # By default as many threads, on which kernels depend.
        "cores": allowed_cores(),
        "openvino": ov.__version__,
        "torch": torch.__version__,
    })[:32]  # fmt: skip
