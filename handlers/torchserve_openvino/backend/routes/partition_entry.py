"""What an entry of a partition holds, checked when it is read, as `call_entry` does for calls."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from torchserve_openvino.backend.spec import Interface

_Spec = tuple[str, tuple[int, ...], bool, tuple[NonNegativeInt, ...] | None, tuple[str, ...]]
_Bounds = tuple[int, int, str, int | None, int | None]


class _StoredInterface(BaseModel):
    """The types in the result of `Interface.to_plain`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runtime: tuple[NonNegativeInt, ...]
    inputs: tuple[_Spec, ...]
    outputs: tuple[_Spec, ...]
    arguments: NonNegativeInt
    constant_bytes: NonNegativeInt
    limits: tuple[tuple[int, tuple[tuple[NonNegativeInt, _Bounds], ...]], ...]
    order: tuple[NonNegativeInt, ...]
    checks: tuple[str, ...]


class _StoredPartition(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    interface: _StoredInterface


def read_interface(body: Mapping[str, Any]) -> Interface:
    """Reads the body of an entry.

    Raises:
        KeyError: A type can't be passed to OpenVINO.
        ValueError: It is not a body that this version writes.
    """
    return Interface.of_plain(_StoredPartition.model_validate(dict(body)).interface.model_dump())
