"""The interface between torch and OpenVINO: types, shapes and memory layouts of inputs and outputs."""

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import openvino as ov
import torch

from torchserve_openvino.ops.memory_order import layout_of
from torchserve_openvino.passes.pass_context import Bounds

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


class SymbolicSizes:
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
            "limits": [[size, [[position, list(bounds)] for position, bounds in limit]] for size, limit in self.limits],
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
                SizeLimits(size, tuple((position, Bounds(*bounds)) for position, bounds in limit))
                for size, limit in plain["limits"]
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


_TENSOR = frozenset({torch.Tensor})


def plain_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Returns the arguments of a call in pytree's order if they are tensors and nothing else; None for other calls.

    Most calls are: pytree, which looks into any structure, takes some 30 us for three tensors.
    """
    leaves = [*args, *kwargs.values()]
    return leaves if set(map(type, leaves)) <= _TENSOR else None


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


# --- computes the formulas of symbolic sizes, such as ``s0 + 3`` or ``(s0 - 1)//2``, as torch writes them ---------


_Known = Mapping[str, int]
_Formula = Callable[[_Known], int | None]


def _exact(left: int, right: int) -> int | None:
    return left // right if right and left % right == 0 else None


def _power(left: int, right: int) -> int | None:
    return left**right if 0 <= right <= 4 else None


_BINARY: dict[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _exact,
    ast.FloorDiv: lambda left, right: left // right if right else None,
    ast.Mod: lambda left, right: left % right if right else None,
    ast.Pow: _power,
}
_CALLS: dict[str, Callable[..., int]] = {"Max": max, "Min": min}


def value_of_formula(text: str, known: _Known) -> int | None:
    """Returns the value of a formula; None if it has no size, one that is not known, or something else than numbers.

    Args:
        text: The formula; it is parsed and computed here, never run as Python.
        known: Sizes by their formulas; that of a symbol is its name.
    """
    # For some sizes that stay open, torch writes the example's number.
    return _parsed(text)(known) if any(letter.isalpha() for letter in text) else None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> _Formula:
    try:
        return _of(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        return _unknown


def _unknown(known: _Known) -> None:
    return None


def _of(node: ast.expr) -> _Formula:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
        return lambda known: number
    if isinstance(node, ast.Name):
        name = node.id
        return lambda known: known.get(name)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _applied(operator.neg, [_of(node.operand)])
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _applied(_BINARY[type(node.op)], [_of(node.left), _of(node.right)])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and node.args:
        return _applied(_CALLS[node.func.id], [_of(arg) for arg in node.args])
    return _unknown


def _applied(function: Callable[..., int | None], parts: list[_Formula]) -> _Formula:
    def value(known: _Known) -> int | None:
        values = [part(known) for part in parts]
        return None if None in values else function(*values)

    return value


# --- which input sizes stay symbolic in a graph. Light to import, because a worker that starts warm traces nothing


@dataclass(frozen=True)
class OpenAxes:
    """Axes of a model's inputs whose sizes should stay symbolic in its graph.

    If torch can't trace without knowing a size, there is still one graph for each size.

    Attributes:
        axes: Maps the name of an input, or its position, to its axes.
        ones: Whether a size of 1 is treated like any other. If not, it has a graph of its own, which saves the time
            that a graph spends on computing symbolic sizes at each call (about a millisecond for 300 operators).
    """

    axes: Mapping[str | int, tuple[int, ...]]
    ones: bool = True

    def to_plain(self) -> list[Any]:
        """Returns JSON-safe data for a cache key."""
        return [self.ones, sorted([str(name), sorted(axes)] for name, axes in self.axes.items())]


def own_inputs(model: Any, leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Returns position and id of each input that is a tensor of the model itself, as an initial state that it keeps.

    Such an input and the model's own tensor are one input of a graph, which is not that of other calls.
    """
    positions = {id(leaf): position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    modules = model.modules() if positions and isinstance(model, torch.nn.Module) else ()
    own = {
        id(value)
        for module in modules
        for table in (module._parameters, module._buffers, vars(module))
        for value in table.values()
        if id(value) in positions
    }
    return tuple((positions[number], number) for number in sorted(own))
