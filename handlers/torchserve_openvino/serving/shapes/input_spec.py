"""One input of a model as declared: its name, shape, type and range."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import OutsideDeclaredError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Signature:
    """One compiled shape: the batch size, and the length of each named dimension."""

    batch: int
    dims: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([f"batch {self.batch}", *(f"{name} {size}" for name, size in self.dims.items())])


@dataclass(frozen=True)
class InputSpec:
    """One declared input.

    Attributes:
        name: Keyword, or the name of a positional input in messages.
        keyword: Whether the model is called with it by keyword.
        shape: Shape of one item; a size that varies is given by its name.
    """

    name: str
    keyword: bool
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None
    pad: float = 0.0
    mask: bool = False

    def __str__(self) -> str:
        dims = ", ".join(str(size) for size in ("batch", *self.shape))
        return f"{self.name} [{dims}] {str(self.dtype).removeprefix('torch.')}"

    def sizes(self, signature: Signature) -> tuple[int, ...]:
        """Returns the shape of the whole batch in one compiled shape."""
        return (signature.batch, *(signature.dims[size] if isinstance(size, str) else size for size in self.shape))

    def make(self, signature: Signature, generator: torch.Generator) -> torch.Tensor:
        """Generates random values within the declared range; a mask is all ones."""
        shape = self.sizes(signature)
        if self.mask:
            return torch.ones(shape).to(self.dtype)
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if self.dtype.is_floating_point or self.dtype.is_complex:
            if self.low is None and self.high is None:
                return torch.randn(shape, generator=generator).to(self.dtype)
            low = self.low if self.low is not None else 0.0
            high = self.high if self.high is not None else low + 1.0
            return (torch.rand(shape, generator=generator) * (high - low) + low).to(self.dtype)
        first = int(self.low or 0)
        last = int(self.high) if self.high is not None else first + 2
        return torch.randint(first, last, shape, generator=generator).to(self.dtype)

    def check(self, tensor: torch.Tensor, lengths: dict[str, int]) -> int:
        """Checks a tensor, adds its named dimensions to ``lengths``, and returns its batch size.

        Raises:
            OutsideDeclaredError: The rank, a size, the dtype or the range of integers is not as declared.
        """
        if tensor.dim() != len(self.shape) + 1 or tensor.dtype is not self.dtype:
            raise OutsideDeclaredError(f"{self._got(tensor)}; it takes {self}")
        for size, declared in zip(tensor.shape[1:], self.shape, strict=True):
            if isinstance(declared, str):
                if lengths.setdefault(declared, size) != size:
                    raise OutsideDeclaredError(
                        f"{self._got(tensor)}, where {declared} is {lengths[declared]} in another input"
                    )
            elif size != declared:
                raise OutsideDeclaredError(f"{self._got(tensor)}; it takes {self}")
        if (self.low is not None or self.high is not None) and not self.dtype.is_floating_point and tensor.numel():
            self._check_range(tensor)
        return tensor.shape[0]

    def _check_range(self, tensor: torch.Tensor) -> None:
        least, largest = (int(value) for value in torch.aminmax(tensor))
        if self.low is not None and least < self.low:
            raise OutsideDeclaredError(f"input {self.name} holds {least}; the least value is {self.low:g}", values=True)
        if self.high is not None and largest >= self.high:
            raise OutsideDeclaredError(
                f"input {self.name} holds {largest}; values must be below {self.high:g}", values=True
            )

    def _got(self, tensor: torch.Tensor) -> str:
        return f"input {self.name} is {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    def pad_to(self, tensor: torch.Tensor, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> torch.Tensor:
        """Returns the tensor with named dimensions padded at their ends."""
        widths: list[int] = []
        for declared in reversed(self.shape):
            grown = sizes[declared] - lengths[declared] if isinstance(declared, str) else 0
            widths += [0, grown]
        if not any(widths):
            return tensor
        value = 0 if self.mask else self.pad
        return torch.nn.functional.pad(tensor, widths, value=value)


def parameter_names(model: Any) -> list[str]:
    """Returns the names of the arguments of a model's forward; empty where it takes ``*args`` or ``**kwargs``."""
    forward: Callable[..., Any] = getattr(model, "forward", model)
    if isinstance(forward, torch.ScriptMethod):
        return [argument.name for argument in forward.schema.arguments][1:]
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        # Builtins have no signature.
        return []
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
        return []
    return [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]


def declared_specs(declared: Sequence[WarmupInput], parameters: Sequence[str]) -> list[InputSpec]:
    """Converts ``handler.openvino.warmup.inputs`` to specs; an input without a name gets the model's argument name."""
    specs = []
    for position, spec in enumerate(declared):
        default = parameters[position] if position < len(parameters) else f"input {position}"
        specs.append(
            InputSpec(
                name=spec.name or default,
                keyword=spec.name is not None,
                shape=spec.item_shape(),
                dtype=getattr(torch, spec.dtype),
                low=spec.low,
                high=spec.high,
                pad=spec.pad,
                mask=spec.mask,
            )
        )
    return specs


def specs_of_sample(sample: Inputs, parameters: Sequence[str]) -> list[InputSpec]:
    """Derives specs from the inputs of a sample; none where an input is not a tensor with a batch dimension."""
    args, kwargs = sample
    if not all(isinstance(value, torch.Tensor) and value.dim() for value in (*args, *kwargs.values())):
        return []
    names = [parameters[i] if i < len(parameters) else f"input {i}" for i in range(len(args))]
    plain = [InputSpec(name, False, tuple(t.shape[1:]), t.dtype) for name, t in zip(names, args, strict=True)]
    return plain + [InputSpec(name, True, tuple(t.shape[1:]), t.dtype) for name, t in kwargs.items()]


def declaration_of(name: str | None, tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the ``handler.openvino.warmup.inputs`` entry for a tensor whose first dimension is the batch."""
    named: dict[str, Any] = {"name": name} if name else {}
    return {**named, "shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch.")}
