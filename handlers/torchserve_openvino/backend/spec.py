"""The interface between torch and OpenVINO: types, shapes and memory layouts of inputs and outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import openvino as ov
import torch

from torchserve_openvino.backend.size_formulas import value_of_formula
from torchserve_openvino.ops.memory_order import layout_of
from torchserve_openvino.passes.bounds import Bounds

OV_TYPES: dict[torch.dtype, ov.Type] = {
    torch.float32: ov.Type.f32,
    torch.float16: ov.Type.f16,
    torch.bfloat16: ov.Type.bf16,
    torch.int64: ov.Type.i64,
    torch.int32: ov.Type.i32,
    torch.int16: ov.Type.i16,
    torch.uint8: ov.Type.u8,
    torch.int8: ov.Type.i8,
    torch.bool: ov.Type.boolean,
}


@dataclass(frozen=True)
class ValueSpec:
    """One input or output of a partition.

    Attributes:
        dtype: Element type; int64 for an integer that torch passes as SymInt.
        shape: Sizes of the dimensions; -1 for a symbolic one.
        is_scalar_int: Whether the value is a SymInt, which is passed as a 0-d int64 tensor.
        layout: Order of the dimensions in eager's memory, outermost first; None if contiguous. Results keep eager's
            strides.
        symbols: Formula of each dimension's size, empty if the size is known; () if all are known. Equal formulas mean
            equal sizes, across inputs and outputs.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_scalar_int: bool = False
    layout: tuple[int, ...] | None = None
    symbols: tuple[str, ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether every dimension is known."""
        return -1 not in self.shape

    @property
    def ov_type(self) -> ov.Type:
        """The element type in OpenVINO."""
        return OV_TYPES[self.dtype]

    def to_plain(self) -> list[Any]:
        """Returns JSON-safe data for `of_plain`."""
        return [
            str(self.dtype),
            list(self.shape),
            self.is_scalar_int,
            None if self.layout is None else list(self.layout),
            list(self.symbols),
        ]

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> "ValueSpec":
        """Reads the result of `to_plain`.

        Raises:
            KeyError: The type can't be passed to OpenVINO.
        """
        name, shape, is_scalar_int, layout, symbols = plain
        order = None if layout is None else tuple(layout)
        return cls(_TYPES_BY_NAME[name], tuple(shape), is_scalar_int, order, tuple(symbols))


_TYPES_BY_NAME = {str(dtype): dtype for dtype in OV_TYPES}


class SizeLimits(NamedTuple):
    """The values for which a partition is exact, at symbolic sizes up to one.

    Attributes:
        size: The largest symbolic size.
        bounds: The bounds on integers of runtime arguments, each behind the argument's position.
    """

    size: int
    bounds: tuple[tuple[int, Bounds], ...]


class Sizes:
    """The symbolic sizes of one call, learned from its inputs and checked against its outputs.

    Attributes:
        largest: The largest of them.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._known: dict[str, int] = {}

    def learn(self, spec: ValueSpec, value: Any) -> None:
        """Learns the sizes of an input: those of a tensor, or an integer itself."""
        sizes = (int(value),) if spec.is_scalar_int else value.shape
        for name, size in zip(spec.symbols, sizes, strict=False):
            if name:
                self.largest = max(self.largest, abs(size))
                self._known[name] = size

    def check(self, spec: ValueSpec, shape: Sequence[int]) -> None:
        """Checks the shape of an output.

        Raises:
            RuntimeError: The shape differs from the one that torch would return.
        """
        if not spec.symbols or spec.is_scalar_int:
            expected: tuple[int, ...] = spec.shape
        elif len(shape) == len(spec.shape):
            expected = tuple(
                self._size(name, actual) if name else size
                for name, size, actual in zip(spec.symbols, spec.shape, shape, strict=True)
            )
        else:
            expected = spec.shape
        if tuple(shape) != expected:
            raise RuntimeError(f"OpenVINO returned the shape {list(shape)} where torch returns {list(expected)}")

    def _size(self, formula: str, actual: int) -> int:
        """Returns a size; what its formula does not say is learned from the first output that has it."""
        if formula not in self._known:
            value = value_of_formula(formula, self._known)
            self._known[formula] = actual if value is None else value
        return self._known[formula]


@dataclass(frozen=True)
class Interface:
    """How a partition is called, regardless of what computes it.

    Attributes:
        runtime: Positions of the partition's arguments that are passed at each call; the others are constants.
        inputs: Spec of each runtime argument.
        outputs: Spec of each output of the model, as eager PyTorch would return it.
        arguments: Number of arguments, constants included.
        constant_bytes: Size of the constants.
        limits: Within which of them integers and sums are exact: for growing symbolic sizes, so for ever fewer values.
        order: For each output of the partition, its position in ``outputs``: two may be the same tensor.
        checks: A sentence for each element of an additional last output, which checks the call's values: an element
            is 0 if OpenVINO would compute something else than torch.
    """

    runtime: tuple[int, ...]
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    arguments: int
    constant_bytes: int
    limits: tuple[SizeLimits, ...]
    order: tuple[int, ...]
    checks: tuple[str, ...]

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-safe data for `of_plain`."""
        return {
            "runtime": list(self.runtime),
            "inputs": [spec.to_plain() for spec in self.inputs],
            "outputs": [spec.to_plain() for spec in self.outputs],
            "arguments": self.arguments,
            "constant_bytes": self.constant_bytes,
            "limits": [[size, [[position, list(bounds)] for position, bounds in each]] for size, each in self.limits],
            "order": list(self.order),
            "checks": list(self.checks),
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Interface":
        """Reads the result of `to_plain`.

        Raises:
            KeyError: A field is missing, or a type can't be passed to OpenVINO.
        """
        return cls(
            runtime=tuple(plain["runtime"]),
            inputs=tuple(ValueSpec.of_plain(spec) for spec in plain["inputs"]),
            outputs=tuple(ValueSpec.of_plain(spec) for spec in plain["outputs"]),
            arguments=plain["arguments"],
            constant_bytes=plain["constant_bytes"],
            limits=tuple(
                SizeLimits(size, tuple((position, Bounds(*bounds)) for position, bounds in each))
                for size, each in plain["limits"]
            ),
            order=tuple(plain["order"]),
            checks=tuple(plain["checks"]),
        )


def checked_spec(checks: Sequence[str]) -> tuple[ValueSpec, ...]:
    """Returns the spec of the additional output for an interface's ``checks``; empty if there are none."""
    return (ValueSpec(torch.int32, (len(checks),)),) if checks else ()


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if shape, strides and type describe a tensor's memory: not if it is sparse, nested or quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def spec_of(value: Any) -> ValueSpec:
    """Describes a fake value of the traced graph.

    Raises:
        TypeError: The value is neither a tensor nor an integer.
    """
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
        symbols = tuple("" if isinstance(size, int) else str(size.node.expr) for size in value.shape)
        return ValueSpec(value.dtype, shape, layout=layout_of(value), symbols=symbols if -1 in shape else ())
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        symbols = (str(value.node.expr),) if isinstance(value, torch.SymInt) else ()
        return ValueSpec(torch.int64, (), is_scalar_int=True, symbols=symbols)
    raise TypeError(f"{type(value).__name__} can't cross between torch and OpenVINO")
