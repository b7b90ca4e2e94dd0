"""The operators of torch's op_db and the samples to run."""

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

# The columns of the tables: types at op_db's sizes, and float32 at the sizes that users have.
REAL = "real_sizes"
COLUMNS = ("float32", "int64", "int32", "bool", "float16", REAL)
# Further types, which have no column: of these, what is wrong is said.
NARROW = ("bfloat16", "uint8", "int8", "int16")
DTYPES = {name: getattr(torch, name) for name in (*COLUMNS, *NARROW) if name != REAL}
# Enough to see every kind of sample; a few operators have thousands.
_MOST_SAMPLES = 120
# Finite values that expose rounding and range errors and do not cancel each other out. Samples take the lists in turn:
# integers of the first run in eager PyTorch, those of the second are exact until something is computed of them.
_MIDDLES = (4097, -5793, 65537, 1001, -12345)
EXTREMES: dict[torch.dtype, tuple[tuple[float, ...], ...]] = {
    torch.float32: ((1e8, 3e-6, -3e4, 1e-30, -87.0, 2049.5),),
    torch.float16: ((2049.0, -3e4, 1e-3, -6e-6, -11.0),),
    torch.bfloat16: ((515.0, -3e4, 1e-3, -6e-6, -11.0),),
    torch.int64: ((2**24 + 1, 2**24 + 2, -(2**24) - 3, 123456789, -1000000007, 2**30 + 7, 2**40), _MIDDLES),
    torch.int32: ((2**24 + 1, 2**24 + 2, -(2**24) - 3, 123456789, -1000000007, 2**30 + 7), _MIDDLES),
    torch.int16: ((32767, -32768, 257, -4097, 181),),
    torch.uint8: ((255, 128, 0, 200, 17),),
    torch.int8: ((127, -128, 64, -1, 12),),
}
# Boundaries must be sorted and lengths must fit (eager itself crashes otherwise); a polynomial of degree 10^8 never
# finishes; in soft_margin_loss eager's exp overflows where OpenVINO's softplus does not.
NO_EXTREMES = frozenset(
    """
    bucketize searchsorted _segment_reduce.lengths _segment_reduce.offsets nn.functional.ctc_loss
    special.laguerre_polynomial_l special.legendre_polynomial_p nn.functional.soft_margin_loss
    """.split()
)
# They return uninitialized memory.
UNINITIALIZED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Clones a tensor with its whole storage, which as_strided may read."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    clone = torch.empty(0, dtype=tensor.dtype)
    return clone.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces op_db's wrapper that sets a seed, which Dynamo can't trace; the caller sets the seed."""
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Call:
    """One sample: the arguments of an operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def cloned(self) -> "Call":
        """A copy with its own tensors, since an operator may write to them."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, _clone, (self.args, self.kwargs))
        return Call(args, kwargs)

    def __str__(self) -> str:
        shown = pytree.tree_map_only(
            torch.Tensor, lambda t: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}", (self.args, self.kwargs)
        )
        return f"{shown[0]} {shown[1] or ''}".strip()[:300]


@functools.lru_cache(maxsize=1)
def op_infos() -> dict[str, Any]:
    """Every OpInfo by its name, with the variant's name if it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    options: dict[str, Any] = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        options.setdefault(name, info)
    return options


def supported(name: str) -> list[str]:
    """What an operator is run in: dtypes that eager supports, and real sizes if float32 is one."""
    dtypes = op_infos()[name].supported_dtypes("cpu")
    columns = [dtype for dtype, torch_dtype in DTYPES.items() if torch_dtype in dtypes]
    return [*columns, REAL] if "float32" in columns else columns


def function_of(name: str) -> Callable[..., Any]:
    """The function to call."""
    function = op_infos()[name].op
    if "wrapper_set_seed" in getattr(function, "__globals__", {}):
        function.__globals__["wrapper_set_seed"] = _plain
    return function


def calls_of(name: str, dtype: str, count: int, extremes: bool = False) -> list[Call]:
    """Samples of an operator, spread evenly over the first `_MOST_SAMPLES` that torch has.

    Args:
        name: Name in op_db.
        dtype: One of `DTYPES`.
        count: Maximum number of samples.
        extremes: Whether to insert very large and very small values.
    """
    random.seed(0)
    torch.manual_seed(0)
    samples = op_infos()[name].sample_inputs("cpu", DTYPES[dtype], requires_grad=False)
    calls = spread([Call((s.input, *s.args), s.kwargs) for s in itertools.islice(samples, _MOST_SAMPLES)], count)
    return [_with_extremes(call, turn) for turn, call in enumerate(calls)] if extremes else calls


def _with_extremes(call: Call, turn: int) -> Call:
    """Replaces every third value of each tensor; the first position differs between tensors."""
    starts = itertools.count()

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        start = next(starts)
        if tensor.layout is not torch.strided or tensor.dtype not in EXTREMES:
            return tensor
        flat = tensor.detach().clone().flatten()
        lists = EXTREMES[tensor.dtype]
        values = itertools.islice(itertools.cycle(lists[turn % len(lists)]), start, None)
        for index, value in zip(range(start % 3, flat.numel(), 3), values, strict=False):
            flat[index] = value
        return flat.reshape(tensor.shape)

    args, kwargs = pytree.tree_map_only(torch.Tensor, replaced, (call.args, call.kwargs))
    return Call(args, kwargs)


def spread(items: list[Any], count: int) -> list[Any]:
    """At most ``count`` of the items, evenly spread, the first among them."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# Operators whose indices may name any of several equal values, and the position of each one's dimension argument.
TIES = {"topk": 2, "sort": 1, "argsort": 1, "kthvalue": 2, "median": 1}


def settled(name: str, call: Call, answer: Any) -> Any:
    """Replaces indices by the values they select: torch leaves open which of several equal values an index names.

    Eigenvalues come in no order either.
    """
    if name == "linalg.eigvals":
        return torch.from_numpy(np.sort_complex(answer.numpy()))
    if name not in TIES or (name == "median" and isinstance(answer, torch.Tensor)):
        return answer
    source, position = call.args[0], TIES[name]
    axis = call.args[position] if len(call.args) > position else -1
    dim = call.kwargs.get("dim", -1 if isinstance(axis, bool) else axis)
    indices = answer if name == "argsort" else answer[1]
    # Without ``keepdim``, median and kthvalue drop a dimension.
    wide = indices if indices.dim() == source.dim() else indices.unsqueeze(dim)
    taken = torch.gather(source, dim, wide) if source.dim() else source.expand(indices.shape)
    return taken if name == "argsort" else (answer[0], taken)
