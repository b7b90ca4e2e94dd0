"""Complex numbers inside a graph as pairs of real ones: OpenVINO has no complex type.

Each operator on complex tensors is decomposed to operators on pairs between `view_as_real` and `view_as_complex`; where
these two meet, `join_pairs` removes both. They remain where a complex tensor enters or leaves the graph, or where an
operator has no decomposition here: there eager PyTorch runs, counted.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchserve_openvino.ops import fourier
from torchserve_openvino.ops.names import RENAMES, op_name
from torchserve_openvino.ops.rule_registry import Decomposition, Rule, declare

aten = torch.ops.aten
fft = fourier.OPERATORS


def _is_pairs(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.complex64


def _pairs(x: Tensor) -> Tensor:
    return aten.view_as_real.default(x)


def _complex(pairs: Tensor) -> Tensor:
    return aten.view_as_complex.default(pairs)


def _of(real: Tensor, imaginary: Tensor) -> Tensor:
    return _complex(torch.stack([real, imaginary], -1))


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    pairs = _pairs(x)
    return pairs.select(-1, 0), pairs.select(-1, 1)


def _positive(dims: Any, rank: int) -> list[int]:
    return [dim % rank for dim in dims]


# --- transforms ---------------------------------------------------------------------------------------------------


def _r2c(x: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor:
    dim = _positive(dim, x.dim())
    is_open = len(dim) == 1 and onesided and fourier.serves_open(x.shape[dim[0]], normalization)
    if x.dtype is not torch.float32 or not (is_open or _are_served(x, dim)):
        return NotImplemented
    return _of(*fft.r2c.default(x, dim, normalization, onesided))


def _c2c(x: Tensor, dim: list[int], normalization: int, forward: bool) -> Tensor:
    dim = _positive(dim, x.dim())
    if not _is_pairs(x) or not _are_served(x, dim):
        return NotImplemented
    return _of(*fft.c2c.default(*_parts(x), dim, normalization, forward))


def _c2r(x: Tensor, dim: list[int], normalization: int, last_dim_size: int) -> Tensor:
    dim = _positive(dim, x.dim())
    if not _is_pairs(x) or not _are_served(x, dim[:-1], last_dim_size) or x.shape[dim[-1]] != last_dim_size // 2 + 1:
        return NotImplemented
    return fft.c2r.default(*_parts(x), dim, normalization, last_dim_size)


def _are_served(x: Tensor, dim: list[int], *lengths: int) -> bool:
    lengths = (*(x.shape[axis] for axis in dim), *lengths)
    return bool(lengths) and all(map(fourier.serves, lengths))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def _abs(x: Tensor) -> Tensor:
    return torch.hypot(*_parts(x)) if _is_pairs(x) else NotImplemented


def _angle(x: Tensor) -> Tensor:
    if not _is_pairs(x):
        return NotImplemented
    real, imaginary = _parts(x)
    return torch.atan2(imaginary, real)


def _conj(x: Tensor) -> Tensor:
    if not _is_pairs(x):
        return NotImplemented
    real, imaginary = _parts(x)
    return _of(real, -imaginary)


def _each_part(op: Any) -> Decomposition:
    """Makes the decomposition of an operator that treats both parts alike."""

    def decomposed(x: Tensor) -> Tensor:
        return _complex(op(_pairs(x))) if _is_pairs(x) else NotImplemented

    return decomposed


def _sum(op: Any) -> Decomposition:
    def decomposed(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
        if isinstance(alpha, complex) or not (_is_pairs(x) or _is_pairs(y)):
            return NotImplemented
        if _is_pairs(x) and _is_pairs(y):
            return _complex(op(*_same_rank(x, y), alpha=alpha))
        pairs, other = (x, y) if _is_pairs(x) else (y, x)
        if isinstance(other, complex) and pairs is x and alpha == 1:
            real, imaginary = _parts(x)
            return _of(op(real, other.real), op(imaginary, other.imag))
        plain = isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.dtype is torch.float32)
        if not plain or alpha != 1:
            return NotImplemented
        real, imaginary = _parts(pairs)
        reverse = pairs is y and op is torch.sub
        # A sum with 0 is 0 without a sign, and OpenVINO would drop it.
        imaginary = torch.where(imaginary == 0, 0.0, -imaginary if reverse else imaginary)
        return _make(other - real if reverse else op(real, other), imaginary)

    return decomposed


def _reversed_difference(x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return _DECOMPOSED[aten.sub.Tensor](y, x, alpha=alpha)


def _reduced(op: Any) -> Decomposition:
    """Makes the decomposition of a sum or mean over some dimensions, or over all."""

    def decomposed(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, **options: Any) -> Tensor:
        if not _is_pairs(x) or not x.dim() or options.get("dtype") not in {None, x.dtype}:
            return NotImplemented
        return _complex(op(_pairs(x), _positive(dim or range(x.dim()), x.dim()), keepdim))

    return decomposed


def _product(op: Any) -> Decomposition:
    """Makes the decomposition of a matrix product."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        if not (_is_pairs(x) and _is_pairs(y)):
            return NotImplemented
        (a, b), (c, d) = _parts(x), _parts(y)
        return _of(op(a, c) - op(b, d), op(a, d) + op(b, c))

    return decomposed


def _same_rank(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the pairs of both, with the leading dimensions that broadcasting adds."""
    rank = max(x.dim(), y.dim())
    pairs = [_pairs(operand) for operand in (x, y)]
    first, second = (p.reshape([1] * (rank + 1 - p.dim()) + list(p.shape)) for p in pairs)
    return first, second


def _mul(x: Any, y: Any) -> Tensor:
    if not isinstance(x, Tensor) or not (_is_pairs(x) or _is_pairs(y)):
        return NotImplemented
    if isinstance(y, complex):
        real, imaginary = _parts(x)
        return _of(real * y.real - imaginary * y.imag, real * y.imag + imaginary * y.real)
    if _is_pairs(x) and _is_pairs(y):
        (a, b), (c, d) = _parts(x), _parts(y)
        return _of(a * c - b * d, a * d + b * c)
    pairs, factor = (x, y) if _is_pairs(x) else (y, x)
    if isinstance(factor, Tensor) and factor.dtype is not torch.float32:
        return NotImplemented
    real, imaginary = _parts(pairs)
    return _of(real * factor, imaginary * factor)


def _quotient(a: Any, b: Any, c: Tensor, d: Tensor) -> Tensor:
    """Divides a + bi by c + di after scaling by the larger part (Smith, 1962; c10/util/complex.h does the same)."""
    swapped = c.abs() < d.abs()
    larger, smaller = torch.where(swapped, d, c), torch.where(swapped, c, d)
    ratio = smaller / larger
    scale = larger + smaller * ratio
    real = torch.where(swapped, a * ratio + b, a + b * ratio) / scale
    imaginary = torch.where(swapped, b * ratio - a, b - a * ratio) / scale
    is_zero = larger == 0
    return _of(torch.where(is_zero, a / larger.abs(), real), torch.where(is_zero, b / larger.abs(), imaginary))


def _div(x: Any, y: Any) -> Tensor:
    if isinstance(y, complex):
        if not _is_pairs(x):
            return NotImplemented
        return _quotient(*_parts(x), torch.full((), y.real), torch.full((), y.imag))
    if _is_pairs(y):
        if not _is_pairs(x) and x.dtype is not torch.float32:
            return NotImplemented
        a, b = _parts(x) if _is_pairs(x) else (x, 0.0)
        return _quotient(a, b, *_parts(y))
    is_real = isinstance(y, (int, float)) or (isinstance(y, Tensor) and y.dtype is torch.float32)
    if not _is_pairs(x) or not is_real:
        return NotImplemented
    real, imaginary = _parts(x)
    return _of(real / y, imaginary / y)


def _reciprocal(x: Tensor) -> Tensor:
    return _quotient(1.0, 0.0, *_parts(x)) if _is_pairs(x) else NotImplemented


def _exp(x: Tensor) -> Tensor:
    if not _is_pairs(x):
        return NotImplemented
    real, imaginary = _parts(x)
    return _of(torch.exp(real) * torch.cos(imaginary), torch.exp(real) * torch.sin(imaginary))


def _make(real: Tensor, imaginary: Tensor) -> Tensor:
    if real.dtype is not torch.float32:
        return NotImplemented
    real, imaginary = torch.broadcast_tensors(real, imaginary)
    return _of(real, imaginary)


def _to_copy(x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **rest: Any) -> Tensor:
    """Converts a real tensor to a complex one."""
    if dtype is not torch.complex64 or x.dtype is not torch.float32 or device not in {None, x.device}:
        return NotImplemented
    return _of(x, torch.zeros_like(x))


def _polar(size: Tensor, angle: Tensor) -> Tensor:
    return _make(size * torch.cos(angle), size * torch.sin(angle)) if size.dtype is torch.float32 else NotImplemented


# --- movement -----------------------------------------------------------------------------------------------------


def _permute(x: Tensor, dims: list[int]) -> Tensor:
    if not _is_pairs(x):
        return NotImplemented
    return _complex(_pairs(x).permute([*_positive(dims, x.dim()), x.dim()]))


def _shaped(op: Any) -> Decomposition:
    def decomposed(x: Tensor, size: list[int], **options: Any) -> Tensor:
        return _complex(op(_pairs(x), [*size, 2], **options)) if _is_pairs(x) else NotImplemented

    return decomposed


def _view(x: Tensor, size: list[int]) -> Tensor:
    return _complex(torch.reshape(_pairs(x), [*size, 2])) if _is_pairs(x) else NotImplemented


def _along(op: Any, added: int = 0) -> Decomposition:
    """Makes the decomposition of an operator that takes a dimension after its tensor, 0 by default."""

    def decomposed(x: Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_pairs(x) or not x.dim() + added:
            return NotImplemented
        return _complex(op(_pairs(x), dim % (x.dim() + added), *args, **kwargs))

    return decomposed


def _squeeze(x: Tensor, dim: list[int]) -> Tensor:
    if not _is_pairs(x):
        return NotImplemented
    return _complex(aten.squeeze.dims(_pairs(x), _positive(dim, x.dim())))


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    if not all(_is_pairs(x) and x.dim() for x in tensors):
        return NotImplemented
    return _complex(torch.cat([_pairs(x) for x in tensors], dim % tensors[0].dim()))


def _clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
    return _complex(_pairs(x).clone(memory_format=torch.contiguous_format)) if _is_pairs(x) else NotImplemented


_DECOMPOSED: dict[Any, Decomposition] = {
    aten._fft_r2c.default: _r2c,
    aten._fft_c2c.default: _c2c,
    aten._fft_c2r.default: _c2r,
    aten.abs.default: _abs,
    aten.angle.default: _angle,
    aten._conj.default: _conj,
    aten._conj_physical.default: _conj,
    aten.reciprocal.default: _reciprocal,
    aten.exp.default: _exp,
    aten.neg.default: _each_part(torch.neg),
    aten.add.Tensor: _sum(torch.add),
    aten.sub.Tensor: _sum(torch.sub),
    aten.rsub.Tensor: _reversed_difference,
    aten.rsub.Scalar: _reversed_difference,
    aten.sum.dim_IntList: _reduced(aten.sum.dim_IntList),
    aten.sum.default: _reduced(aten.sum.dim_IntList),
    aten.mean.dim: _reduced(aten.mean.dim),
    aten.mean.default: _reduced(aten.mean.dim),
    aten.mm.default: _product(torch.mm),
    aten.bmm.default: _product(torch.bmm),
    aten.mul.Tensor: _mul,
    aten.div.Tensor: _div,
    aten.complex.default: _make,
    aten.polar.default: _polar,
    aten._to_copy.default: _to_copy,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _shaped(aten.expand.default),
    aten.slice.Tensor: _along(aten.slice.Tensor),
    aten.select.int: _along(aten.select.int),
    aten.unsqueeze.default: _along(aten.unsqueeze.default, 1),
    aten.squeeze.dims: _squeeze,
    aten.cat.default: _cat,
    aten.clone.default: _clone,
}
for _op, _of_pairs in _DECOMPOSED.items():
    declare(Rule(decompose_complex=_of_pairs), _op)
declare(
    Rule(banned="OpenVINO does not compute complex numbers"), aten.view_as_complex.default, aten.view_as_real.default
)
declare(
    Rule(banned="OpenVINO is slow and loses digits at lengths above 1024 that are no power of 2, and at open ones"),
    aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default,
)  # fmt: skip
declare(Rule(convert=fourier.convert_r2c, facts=fourier.facts), fft.r2c.default)
declare(Rule(convert=fourier.convert_c2c, facts=fourier.facts), fft.c2c.default)
declare(Rule(convert=fourier.convert_c2r, facts=fourier.facts), fft.c2r.default)


def join_pairs(graph: Graph) -> None:
    """Removes each `view_as_real` of a `view_as_complex`, and the latter if it has no other users."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.view_as_real.default:
            continue
        source = node.args[0]
        while isinstance(source, Node) and source.op == "call_function" and op_name(source.target) in RENAMES:
            source = source.args[0]
        if isinstance(source, Node) and source.target is aten.view_as_complex.default:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        idle = node.op == "call_function" and not node.users and node.target is not operator.setitem
        if idle and (op_name(node.target) in RENAMES or node.target is aten.view_as_complex.default):
            graph.erase_node(node)
