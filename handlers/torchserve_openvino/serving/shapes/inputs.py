"""The declared inputs of a model: checks calls against them, pads calls to compiled shapes, and generates inputs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchserve_openvino.backend import OpenAxes
from torchserve_openvino.errors import OutsideDeclaredError, UndeclaredInputError
from torchserve_openvino.serving.shapes.input_spec import Inputs, InputSpec, Signature, declaration_of

Convert = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@dataclass(slots=True)
class Fitted:
    """A call in the form in which it is compiled.

    Attributes:
        args: Positional tensors; named dimensions are padded, the batch is not.
        kwargs: Keyword tensors, in the same form.
        rows: Items in the call: the size of the batch dimension of every tensor.
        lengths: Length of each named dimension before padding.
        sizes: Length of each named dimension after padding.
    """

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    rows: int
    lengths: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def padded(self) -> bool:
        """Whether any named dimension was padded."""
        return self.lengths != self.sizes

    def shapes(self) -> tuple[Any, ...]:
        """Returns the shapes and dtypes that two calls must share to be joined along the batch."""
        return (
            tuple([(t.shape[1:], t.dtype) for t in self.args]),
            tuple([(name, t.shape[1:], t.dtype) for name, t in self.kwargs.items()]),
        )


class DeclaredInputs:
    """The declared inputs of a model.

    Args:
        specs: In the order of the model's arguments.
        parameters: Argument names of the model's forward; empty where they are unknown.
        dims: Compiled lengths of each named dimension, ascending.
        pads: Whether a length between two compiled ones is padded.
        exact: Whether a length must be a compiled one; otherwise any length up to the largest is accepted.
    """

    def __init__(
        self,
        specs: Sequence[InputSpec],
        parameters: Sequence[str] = (),
        dims: Mapping[str, Sequence[int]] | None = None,
        *,
        pads: bool = True,
        exact: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.dims = {name: list(sizes) for name, sizes in (dims or {}).items()}
        self._pads, self._exact = pads, exact
        self._positions = {name: i for i, name in enumerate(parameters)}
        self._order = self._order_of_positions()
        self._by_keyword = any(spec.keyword for spec in self.specs)
        self._indices = {spec.name: i for i, spec in enumerate(self.specs)}

    def __str__(self) -> str:
        limits = [f"{name} up to {sizes[-1]}" for name, sizes in self.dims.items()]
        return "; ".join([", ".join(map(str, self.specs)), *limits])

    @property
    def names(self) -> list[str]:
        """Names of the inputs, in order."""
        return [spec.name for spec in self.specs]

    def open_axes(self, *, ones: bool) -> OpenAxes:
        """Returns the batch axis and the named dimensions of every input; for ``ones`` see `OpenAxes.ones`."""
        positions = itertools.count()
        return OpenAxes({
            spec.name if spec.keyword else next(positions):
            (0, *(axis for axis, size in enumerate(spec.shape, 1) if isinstance(size, str)))
            for spec in self.specs
        }, ones)  # fmt: skip

    def make(self, signature: Signature, seed: int = 0) -> Inputs:
        """Generates inputs of one compiled shape, the same in every worker."""
        generator = torch.Generator().manual_seed(seed)
        return self.call([spec.make(signature, generator) for spec in self.specs])

    def fit(self, args: Sequence[Any], kwargs: Mapping[str, Any], convert: Convert | None = None) -> Fitted:
        """Returns a call in the form that is compiled: arguments in declared order, named dimensions padded.

        Args:
            convert: Converts a tensor to the declared dtype where its own was only guessed.

        Raises:
            OutsideDeclaredError: The call fits no declared shape; the message names the limits.
        """
        tensors = self._bind(args, kwargs)
        if convert is not None:
            tensors = [t if t is None else convert(t, s.dtype) for t, s in zip(tensors, self.specs, strict=True)]
        lengths: dict[str, int] = {}
        rows = {spec.check(t, lengths) for spec, t in zip(self.specs, tensors, strict=True) if t is not None}
        if len(rows) != 1 or rows == {0}:
            raise OutsideDeclaredError("the inputs must share a batch dimension of at least 1")
        (batch,) = rows
        passed = [tensor for tensor in tensors if tensor is not None]
        if not lengths and len(passed) == len(tensors):
            return Fitted(*self.call(passed), batch)
        sizes = {name: self._size(name, length) for name, length in lengths.items()}
        ready = [
            spec.pad_to(_mask(spec, batch, lengths) if tensor is None else tensor, lengths, sizes)
            for spec, tensor in zip(self.specs, tensors, strict=True)
        ]
        return Fitted(*self.call(ready), batch, lengths, sizes)

    def unpad(self, fitted: Fitted) -> Inputs:
        """Returns a fitted call without the padding of named dimensions."""
        if not fitted.padded:
            return fitted.args, fitted.kwargs
        positional = iter(fitted.args)
        tensors = []
        for spec in self.specs:
            tensor = fitted.kwargs[spec.name] if spec.keyword else next(positional)
            for axis, name in enumerate(spec.shape, 1):
                if isinstance(name, str):
                    tensor = tensor.narrow(axis, 0, fitted.lengths[name])
            tensors.append(tensor.contiguous())
        return self.call(tensors)

    def call(self, tensors: Sequence[torch.Tensor]) -> Inputs:
        """Returns the call that passes these tensors, one for each input in declared order."""
        if not self._by_keyword:
            return tuple(tensors), {}
        args = tuple([t for spec, t in zip(self.specs, tensors, strict=True) if not spec.keyword])
        return args, {spec.name: t for spec, t in zip(self.specs, tensors, strict=True) if spec.keyword}

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
        by_position: dict[int, Any] = {}
        for position, value in enumerate(args):
            index = self._order.get(position)
            if index is None:
                raise OutsideDeclaredError(f"{len(args)} inputs given; the model takes {self}")
            by_position[index] = value
        for name, value in kwargs.items():
            index = self._indices.get(name)
            if index is None and name in self._positions:
                raise UndeclaredInputError(
                    f"the model takes {name!r}, which handler.openvino.warmup.inputs does not declare: {self}. Add "
                    f"{_declaration(name, value)} to it."
                )
            if index is None or index in by_position:
                raise OutsideDeclaredError(f"unknown input {name!r}; the model takes {self}")
            by_position[index] = value
        tensors: list[torch.Tensor | None] = []
        for i, spec in enumerate(self.specs):
            value = by_position.get(i)
            if value is None and not spec.mask:
                raise OutsideDeclaredError(f"input {spec.name!r} is missing; the model takes {self}")
            if value is not None and not isinstance(value, torch.Tensor):
                raise OutsideDeclaredError(f"input {spec.name!r} must be a tensor, not {type(value).__name__}")
            tensors.append(value)
        return tensors

    def _order_of_positions(self) -> dict[int, int]:
        """Maps positions in a call to indices of inputs, by the model's parameter names where these are known."""
        if all(spec.name in self._positions for spec in self.specs):
            return {self._positions[spec.name]: i for i, spec in enumerate(self.specs)}
        return {i: i for i in range(len(self.specs))}

    def _size(self, name: str, length: int) -> int:
        sizes = self.dims[name]
        bucket = next((size for size in sizes if size >= length), None)
        if length == 0 or bucket is None or (self._exact and bucket != length):
            taken = f"one of {sizes}" if self._exact else f"1 to {sizes[-1]}"
            raise OutsideDeclaredError(f"{name} is {length}; this model takes {taken} (handler.openvino.batching.dims)")
        return bucket if self._pads else length


def _declaration(name: str, value: Any) -> str:
    """Returns the configuration entry that declares an input like this one."""
    if not isinstance(value, torch.Tensor):
        return f"{{name: {name}, shape: [...]}}"
    return f"{{{', '.join(f'{key}: {text}' for key, text in declaration_of(name, value).items())}}}"


def _mask(spec: InputSpec, rows: int, lengths: Mapping[str, int]) -> torch.Tensor:
    shape = [lengths[size] if isinstance(size, str) else size for size in spec.shape]
    return torch.ones(rows, *shape, dtype=spec.dtype)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or an ordinary copy of an inference tensor.

    Dynamo's guards distinguish the two: a batch that was padded in inference mode would recompile the model.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
