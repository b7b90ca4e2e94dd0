"""Samples of operators at the sizes that users have: torch's own samples scaled up, and published ones by family."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from conformance.cases import Call, function_of, op_infos, spread
from fuzzing.cost import seconds_of

# The size of each dimension by the number of dimensions; the first for which the operator is cheap enough is taken.
_SIZES: tuple[Mapping[int, int], ...] = (
    {1: 1_000_000, 2: 1000, 3: 100, 4: 32, 5: 16},
    {1: 100_003, 2: 257, 3: 64, 4: 24, 5: 10},
    {1: 4_097, 2: 65, 3: 33, 4: 12, 5: 7},
)
_SECONDS = 0.25
# Samples of fewer elements say nothing about sizes.
_LEAST = 1_000
# A result of a million rows as a million tensors says nothing either, and a grid of all values does not fit.
_TENSORS, _ELEMENTS = 64, 2**26
# Their lengths and offsets must fit their values, which eager does not check.
_UNSAFE = frozenset({"_segment_reduce.lengths", "_segment_reduce.offsets"})
# Of torch's samples, so many are listed, and so many of them are tried.
_LISTED, _TRIED = 120, 10


def real_calls(name: str) -> list[Call]:
    """At most two samples of an operator in float32; none if eager refuses all.

    Args:
        name: Name in op_db.
    """
    if name in _UNSAFE:
        return []
    torch.manual_seed(0)
    function = function_of(name)
    published = _PUBLISHED.get(name.removeprefix("nn.functional."))
    if published is not None and name.startswith("nn.functional."):
        return [Call(tuple(args), kwargs) for args, kwargs in published()]
    samples = itertools.islice(op_infos()[name].sample_inputs("cpu", torch.float32, requires_grad=False), _LISTED)
    calls = spread([Call((s.input, *s.args), s.kwargs) for s in samples], _TRIED)
    fits: dict[int, Call] = {}
    # The first that fits, and the last.
    for order in (range(len(calls)), reversed(range(len(calls)))):
        for position in order:
            if position in fits:
                break
            if (scaled := _first(function, _scaled(calls[position]))) is not None:
                fits[position] = scaled
                break
    return list(fits.values())


def _first(function: Callable[..., Any], calls: Iterator[Call]) -> Call | None:
    """The first sample that is cheap and that eager accepts."""
    for call in calls:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _blank, (call.args, call.kwargs))
        seconds = seconds_of(lambda args=args, kwargs=kwargs: function(*args, **kwargs))  # type: ignore[misc]
        elements = sum(leaf.numel() for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        if elements < _LEAST or (seconds is None and elements > 20_000) or (seconds is not None and seconds > _SECONDS):
            continue
        try:
            with torch.no_grad():
                results = pytree.tree_leaves(function(*call.cloned().args, **call.cloned().kwargs))
        except Exception:
            # The sizes do not fit its other arguments.
            continue
        if len(results) <= _TENSORS and sum(map(torch.numel, filter(torch.is_tensor, results))) <= _ELEMENTS:
            return call
    return None


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _scaled(call: Call) -> Iterator[Call]:
    """The sample at each of `_SIZES`: equal sizes stay equal, and larger ones larger."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = all(t.layout is torch.strided and not t.is_complex() and t.numel() for t in tensors)
    rank = max((t.dim() for t in tensors), default=0)
    if not plain or not rank:
        return
    known = sorted({size for t in tensors for size in t.shape if size > 1})
    for sizes in _SIZES:
        if rank not in sizes:
            continue
        larger = {size: sizes[rank] + position for position, size in enumerate(known)}
        for numbers_too in (False, True):
            sample = _with_sizes(call, larger, numbers_too)
            if sample is not None:
                yield sample


def _with_sizes(call: Call, larger: Mapping[int, int], numbers_too: bool) -> Call | None:
    """The sample with other sizes; of the numbers in its lists, those that are sizes become larger too."""

    def numbers(value: Any) -> Any:
        whole = isinstance(value, (tuple, list)) and value and all(type(item) is int for item in value)
        return (
            type(value)(larger.get(item, item) for item in value) if whole and type(value) in (tuple, list) else value
        )

    args: Any = [numbers(value) if numbers_too else value for value in call.args]
    kwargs = {name: numbers(value) if numbers_too else value for name, value in call.kwargs.items()}
    if numbers_too and repr(args) == repr(list(call.args)) and repr(kwargs) == repr(call.kwargs):
        return None
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: _larger(tensor, larger), (args, kwargs))
    if kwargs.get("sorter") is not None:
        kwargs["sorter"] = args[0].argsort(-1)
    return Call(tuple(args), kwargs)


def _larger(tensor: torch.Tensor, larger: Mapping[int, int]) -> torch.Tensor:
    """A tensor of other sizes with values from the same range; sorted where the sample is, distinct where it is."""
    shape = [larger.get(size, size) for size in tensor.shape]
    flat = tensor.detach().reshape(-1)
    if tensor.is_floating_point():
        finite = flat[flat.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
        random = torch.rand(shape) * (high - low) + low
    elif tensor.dim() == 1 and tensor.dtype is not torch.bool and len(flat.unique()) == len(flat) > 1:
        random = torch.randperm(shape[0])
    else:
        random = flat[torch.randint(0, len(flat), shape)]
    return (random.sort(-1)[0] if _is_sorted(tensor) else random).to(tensor.dtype)


def _is_sorted(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.bool or not tensor.dim() or tensor.shape[-1] <= 2:
        return False
    return bool((tensor.diff(dim=-1) >= 0).all())


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


Samples = Sequence[tuple[Sequence[Any], dict[str, Any]]]


def _convolutions(rank: int) -> Samples:
    size = {1: (500,), 2: (56, 56), 3: (8, 28, 28)}[rank]
    usual = (_normal(2, 64, *size), _normal(128, 64, *[3] * rank), _normal(128))
    return [
        (usual, {"stride": 2, "padding": 1}),
        ((_normal(1, 96, *size), _normal(96, 1, *[5] * rank)), {"padding": 2, "groups": 96}),
    ]


def _transposed(rank: int) -> Samples:
    size = {1: (100,), 2: (28, 28), 3: (4, 8, 8)}[rank]
    return [((_normal(2, 64, *size), _normal(64, 32, *[4] * rank), _normal(32)), {"stride": 2, "padding": 1})]


def _pools(rank: int, *args: Any) -> Samples:
    size = {1: (512,), 2: (112, 112), 3: (8, 56, 56)}[rank]
    partly = _normal(2, 64, *size)
    partly[..., : size[-1] // 2] = float("-inf")
    return [((_normal(2, 64, *size), *args), {}), ((partly, *args), {})]


def _resized(rank: int, mode: str, **kwargs: Any) -> Samples:
    size = {1: (100,), 2: (56, 56), 3: (8, 14, 14)}[rank]
    return [((_normal(2, 32, *size),), {"scale_factor": 2.0, "mode": mode, **kwargs})]


def _attention() -> Samples:
    query, key, value = (_normal(2, 4, 100, 128) for _ in range(3))
    mask = torch.ones(100, 100).tril().bool()
    short = [_normal(2, 8, 77, 64) for _ in range(3)]
    return [((query, key, value), {"attn_mask": mask}), (short, {"is_causal": True})]


def _batch_norm() -> Samples:
    return [((_normal(4, 64, 56, 56), _normal(64), torch.rand(64) + 0.5, _normal(64), _normal(64)), {})]


def _grid_sample() -> Samples:
    return [((_normal(2, 32, 56, 56), torch.rand(2, 56, 56, 2) * 2.2 - 1.1), {"align_corners": False})]


def _layer_norm() -> Samples:
    return [((_normal(4, 100, 768) + 3, (768,), _normal(768), _normal(768)), {}),
            ((_normal(2, 32, 128, 128) + 10, (32, 128, 128)), {})]  # fmt: skip


_PUBLISHED: dict[str, Callable[[], Samples]] = {
    "interpolate.nearest": lambda: _resized(2, "nearest"),
    "interpolate.nearest-exact": lambda: _resized(2, "nearest-exact"),
    "interpolate.linear": lambda: _resized(1, "linear", align_corners=False),
    "interpolate.bilinear": lambda: _resized(2, "bilinear", align_corners=False),
    "interpolate.bicubic": lambda: _resized(2, "bicubic", align_corners=True),
    "interpolate.trilinear": lambda: _resized(3, "trilinear", align_corners=False),
    "interpolate.area": lambda: [((_normal(2, 32, 56, 56),), {"size": (14, 14), "mode": "area"})],
    "scaled_dot_product_attention": _attention,
    "linear": lambda: [((_normal(4, 64, 768), _normal(1000, 768), _normal(1000)), {})],
    "layer_norm": _layer_norm,
    "rms_norm": lambda: [((_normal(4, 100, 2048) * 3, (2048,), _normal(2048)), {})],
    "group_norm": lambda: [((_normal(2, 64, 128, 128) + 10, 4, _normal(64), _normal(64)), {})],
    "instance_norm": lambda: [((_normal(2, 16, 224, 224) + 10,), {})],
    "batch_norm": _batch_norm,
    "embedding": lambda: [((torch.randint(0, 100_000, (4, 128)), _normal(100_000, 64)), {})],
    "embedding_bag": lambda: [((torch.randint(0, 100_000, (16, 33)), _normal(100_000, 32)), {"mode": "mean"})],
    "grid_sample": _grid_sample,
    "unfold": lambda: [((_normal(2, 32, 56, 56), 3), {"padding": 1})],
    "pixel_shuffle": lambda: [((_normal(2, 64, 56, 56), 2), {})],
    "pixel_unshuffle": lambda: [((_normal(2, 64, 56, 56), 2), {})],
    # Eager's steps grow with the square of the classes, which its estimate does not know.
    "multilabel_margin_loss": lambda: [((_normal(64, 100), torch.randint(-1, 100, (64, 100))), {})],
    "channel_shuffle": lambda: [((_normal(2, 64, 56, 56), 4), {})],
}
for _rank in (1, 2, 3):
    _PUBLISHED |= {
        f"conv{_rank}d": functools.partial(_convolutions, _rank),
        f"conv_transpose{_rank}d": functools.partial(_transposed, _rank),
        f"max_pool{_rank}d": functools.partial(_pools, _rank, 3, 2, 1),
        f"avg_pool{_rank}d": functools.partial(_pools, _rank, 3, 2, 1),
        f"adaptive_avg_pool{_rank}d": functools.partial(_pools, _rank, 7),
        f"adaptive_max_pool{_rank}d": functools.partial(_pools, _rank, 7),
    }
