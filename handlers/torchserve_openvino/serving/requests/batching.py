"""Runs batches of any size on a model compiled for a few sizes: splits, pads with copies, cuts the answer back."""

import bisect
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence, Sized
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import difference
from torchserve_openvino.backend.spec import plain_leaves
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls

# Batches whose answers in parts have to agree with those in one call, before parts are answered with.
_AGREE = 3
# Most shapes whose compiled batch sizes are remembered.
_SHAPES = 1024


class _Form(NamedTuple):
    """Where a call's leaves belong.

    Attributes:
        positional: How many of the leaves are positional arguments.
        names: The keywords of the others.
        spec: pytree's, of a call that has more than tensors; None for tensors alone.
    """

    positional: int = 0
    names: tuple[str, ...] = ()
    spec: Any = None

    def call(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the call with these leaves."""
        if self.spec is None:
            return tuple(leaves[: self.positional]), dict(zip(self.names, leaves[self.positional :], strict=True))
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs


def _flat(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], _Form]:
    leaves = plain_leaves(args, kwargs)
    if leaves is not None:
        return leaves, _Form(len(args), tuple(kwargs))
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    return leaves, _Form(spec=spec)


# Runs leaves of inputs, in their form, and the number of their rows.
_Run = Callable[[Sequence[torch.Tensor], _Form, int], Any]


def bucket_sizes(buckets: Sequence[int] | Literal["auto"], batch_size: int, streams: int = 1) -> list[int]:
    """Returns the batch sizes to compile, in ascending order.

    Args:
        buckets: ``handler.openvino.batching.buckets``; auto takes the largest size and the powers of two below it.
        batch_size: TorchServe's batchSize.
        streams: Parts that a batch is split into; the largest size is then that of the largest part.
    """
    largest = -(-batch_size // streams)
    if buckets != "auto":
        return sorted({*buckets, largest}) if max(buckets) < largest else sorted(set(buckets))
    return sorted({largest, *(2**n for n in range(largest.bit_length()) if 2**n < largest)})


def split_rows(rows: int, sizes: Sequence[int], streams: int = 1) -> list[int]:
    """Returns the sizes of a batch's parts: even over the streams, none larger than the largest compiled size."""
    parts = max(min(streams, rows), -(-rows // sizes[-1]))
    least, more = divmod(rows, parts)
    return [least + 1] * more + [least] * (parts - more)


class RowRunner:
    """Runs a batch of any size.

    Args:
        model: The compiled model.
        sizes: Compiled batch sizes, ascending; None runs every batch as it comes.
        streams: Runs the parts of a batch.
        counters: Counts padded and split calls.
    """

    def __init__(
        self, model: Callable[..., Any], sizes: Sequence[int] | None, streams: ParallelCalls, counters: Counters
    ) -> None:
        self.model = model
        self.sizes = list(sizes) if sizes else None
        self._streams = streams
        self._counters = counters
        self._costs = CallCosts(self.sizes or ())
        self._agreed: dict[Hashable, int] = {}
        # Batch sizes in which each shape has run, so that they are compiled; and the shapes that ran before READY.
        self._ran: dict[Hashable, set[int]] = {}
        self._warm: set[Hashable] = set()

    def has_run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Notes that a call was compiled before READY."""
        leaves = pytree.tree_leaves((tuple(args), kwargs))
        if leaves and all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
            self._warm.add(_rest_of(leaves))
            self._note(_rest_of(leaves), leaves[0].shape[0])

    def _note(self, shape: Hashable, size: int) -> None:
        if shape in self._ran or len(self._ran) < _SHAPES:
            self._ran.setdefault(shape, set()).add(size)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> Any:
        """Runs one batch.

        Args:
            args: Tensors whose first dimension is the batch.
            kwargs: The same, by keyword.
            rows: The batch size.
        """
        sizes = self.sizes
        if sizes is None:
            return self.model(*args, **kwargs)
        leaves, form = _flat(args, kwargs)
        if rows == 1:
            return self._padded(leaves, form, rows)
        parts = split_rows(rows, sizes, self._streams.count)
        # Parts that run at the same time share the processor: what one of them took says nothing of the whole.
        run = self._padded if self._streams.count > 1 else self._cheapest
        if len(parts) == 1:
            return run(leaves, form, rows)
        self._counters.add("split_batches")
        return self._split(run, leaves, form, parts)

    def _split(self, run: _Run, leaves: Sequence[torch.Tensor], form: _Form, parts: Sequence[int]) -> Any:
        starts = [sum(parts[:i]) for i in range(len(parts))]
        # A view that is made in inference mode is an inference tensor: see `inputs.ordinary`.
        with torch.inference_mode(False):
            pieces = [[leaf[start : start + n] for leaf in leaves] for start, n in zip(starts, parts, strict=True)]
        calls = [lambda piece=piece, n=n: run(piece, form, n) for piece, n in zip(pieces, parts, strict=True)]
        return _concatenate(self._streams.run(calls))

    def _cheapest(self, leaves: Sequence[torch.Tensor], form: _Form, rows: int) -> Any:
        """Runs rows that fit into one call, in several where that is faster and gives the same answers."""
        shape = _rest_of(leaves)
        parts = self._costs.parts(shape, rows, self._ran.get(shape, ()))
        if len(parts) == 1:
            return self._padded(leaves, form, rows)
        key = shape, rows, tuple(sorted(parts))
        agreed = self._agreed.get(key, 0)
        if agreed < 0:
            return self._padded(leaves, form, rows)
        answer = self._split(self._padded, leaves, form, parts)
        if agreed < _AGREE:
            # A size was verified as a whole: a model that asks for it may answer otherwise in parts.
            whole = self._padded(leaves, form, rows)
            self._agreed[key] = -1 if difference(answer, whole, "f32") else agreed + 1
            return whole
        self._counters.add("split_batches")
        return answer

    def _padded(self, leaves: Sequence[torch.Tensor], form: _Form, rows: int) -> Any:
        shape = _rest_of(leaves)
        size = self._size_for(rows, shape)
        if size > rows:
            self._counters.add("padded_rows", size - rows)
            with torch.inference_mode(False):
                leaves = [torch.cat([t, t[-1:].expand(size - rows, *t.shape[1:])]) for t in leaves]
        args, kwargs = form.call(leaves)
        start = time.perf_counter()
        output = self.model(*args, **kwargs)
        self._costs.note(shape, size, time.perf_counter() - start)
        self._note(shape, size)
        if size == rows:
            return output
        return pytree.tree_map(lambda v: v[:rows] if isinstance(v, torch.Tensor) else v, output)

    def _size_for(self, rows: int, shape: Hashable) -> int:
        """Returns the batch size that rows are padded to; after READY rather a larger one that is compiled."""
        assert self.sizes is not None
        fit = self.sizes[bisect.bisect_left(self.sizes, rows) :]
        ran = self._ran[shape] if shape in self._warm else ()
        return next((size for size in fit if size in ran), fit[0])


def _rest_of(leaves: Sequence[torch.Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])


def _concatenate(outputs: Sequence[Any]) -> Any:
    flat = [pytree.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, spec)


# --- groups rows of different lengths into batches ------------------------------------------------------------------


def cheapest_groups(
    rows: Sequence[Sized], lengths: Sequence[int], sizes: Sequence[int], overhead: float
) -> list[list[int]]:
    """Groups rows into batches so that as little as possible is padding, in length and in number of rows.

    Args:
        rows: Token sequences, or anything else of different lengths.
        lengths: Compiled lengths, ascending; empty where any length is compiled.
        sizes: Compiled batch sizes, ascending; empty where any size is.
        overhead: What a call costs beside its rows, as a length (`ServedModel.overhead`).

    Returns:
        Positions in ``rows`` of each batch: rows times padded length and the overhead of each batch are least in all.
    """
    order = sorted(range(len(rows)), key=lambda position: len(rows[position]))
    widths = [_next(lengths, len(rows[position])) for position in order]
    largest = sizes[-1] if sizes else len(rows)
    # best[n]: the least cost of the first n rows, and where their last batch begins.
    best = [(0.0, 0)]
    for end in range(1, len(order) + 1):
        starts = range(max(0, end - largest), end)
        best.append(min((best[i][0] + _next(sizes, end - i) * widths[end - 1] + overhead, i) for i in starts))
    groups, end = [], len(order)
    while end:
        groups.append(order[best[end][1] : end])
        end = best[end][1]
    return groups


def _next(sizes: Sequence[int], size: int) -> int:
    """Returns the compiled size that a size is padded to; the size itself beyond the largest."""
    return next((candidate for candidate in sizes if candidate >= size), size)


# --- what a call costs beside its rows ----------------------------------------------------------------------------

# In tokens, where no call was timed. 25 to 200 were measured for encoders of 20 to 110 million weights on two cores of
# a Xeon with AMX, the more the narrower the precision.
UNKNOWN_OVERHEAD = 32.0


def overhead(calls: Sequence[tuple[int, float]]) -> float:
    """Returns what a call costs beside its values, as a number of values: reading the weights, starting kernels.

    It is the a / b for which ``seconds = a + b * values`` is next to the times, relative to each (weighted least
    squares).

    Args:
        calls: How many values each call had, rows times their length, and its seconds.
    """
    if len({values for values, _ in calls}) < 2:
        return UNKNOWN_OVERHEAD
    values, seconds = np.array(calls, dtype=np.float64).T
    slope, intercept = np.polyfit(values, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
    largest = float(values.max())
    # Without a slope, calls take as long however many values there are.
    return float(np.clip(intercept / slope, 0.0, largest)) if slope > 0 else largest


# --- chooses the calls that a batch runs as: one, padded where its size is not compiled, or several smaller ones


# Calls of a size that have to be timed, and the latest ones that count.
_FEWEST, _LATEST = 5, 9
# Several calls have to save this part of the time of one.
_GAIN = 0.1
# Every so many batches one is run to time a size of which little is known, or in one call, whose time may have changed.
_TRY, _RENEW = 8, 64
# Most shapes whose calls are timed.
_TIMED_SHAPES = 256


@dataclass
class _Calls:
    """Calls of one shape: how many batches were asked for, and the latest times by batch size."""

    batches: int = 0
    seconds: dict[int, deque[float]] = field(default_factory=dict)

    def known(self, size: int) -> bool:
        return len(self.seconds.get(size, ())) >= _FEWEST


class CallCosts:
    """Times of calls by batch size.

    What is cheapest depends on the model and on the machine: three rows padded to four cost a model that computes much
    a third more than they need, where the call itself is all that a small one costs; and four rows may leave the
    processor's cache where two rows stay in it.

    Args:
        sizes: Compiled batch sizes, ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._calls: dict[Hashable, _Calls] = {}

    def note(self, shape: Hashable, size: int, seconds: float) -> None:
        """Notes what a call took.

        Args:
            shape: What distinguishes calls besides their batch size.
            size: A compiled batch size.
        """
        if shape in self._calls or len(self._calls) < _TIMED_SHAPES:
            calls = self._calls.setdefault(shape, _Calls())
            calls.seconds.setdefault(size, deque(maxlen=_LATEST)).append(seconds)

    def parts(self, shape: Hashable, rows: int, compiled: Collection[int] | None = None) -> list[int]:
        """Returns the rows of each call that a batch should run as.

        Args:
            rows: At most the largest size.
            compiled: The sizes that are compiled for this shape, all if None; no other one is tried.
        """
        calls = self._calls.get(shape)
        sizes = [size for size in self._sizes if compiled is None or size in compiled]
        if calls is None or rows == 1 or not sizes or sizes[-1] < rows:
            return [rows]
        calls.batches += 1
        unknown = [size for size in sizes if size < rows and not calls.known(size)]
        if unknown and calls.batches % _TRY == 0:
            times, rest = divmod(rows, unknown[-1])
            return [unknown[-1]] * times + [rest] * (rest > 0)
        padded = next(size for size in sizes if size >= rows)
        if not calls.known(padded) or calls.batches % _RENEW == 0:
            return [rows]
        times_of = {size: median(calls.seconds[size]) for size in sizes if calls.known(size)}
        seconds, parts = _cheapest(rows, times_of)
        return parts if seconds < (1 - _GAIN) * times_of[padded] else [rows]


def _cheapest(rows: int, times: dict[int, float]) -> tuple[float, list[int]]:
    """Returns the shortest time for ``rows``, and the rows of each call in it."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for count in range(1, rows + 1):
        ways = []
        for size, seconds in times.items():
            before, parts = best[max(count - size, 0)]
            ways.append((before + seconds, [min(size, count), *parts]))
        best.append(min(ways))
    return best[rows]
