"""Batch shapes: which are compiled, and how a batch between them is run."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree


def bucket_sizes(buckets: Sequence[int] | Literal["auto"], batch_size: int) -> list[int]:
    """Compiled batch sizes in ascending order: the list, or powers of two up to ``batch_size``, and that itself."""
    if buckets != "auto":
        return sorted({*buckets, batch_size}) if max(buckets) < batch_size else sorted(set(buckets))
    sizes = {batch_size}
    size = 1
    while size < batch_size:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


class BucketedModel:
    """A model whose batches are padded to the next compiled size, and its answers cut back.

    Padding repeats the last item. It is only done where every input has the batch as its first dimension, and only kept
    where every output has it too: a model that reduces over the batch runs at the exact size instead.

    Args:
        model: The compiled model; other attributes are its own.
        sizes: Compiled batch sizes in ascending order.
    """

    def __init__(self, model: Callable[..., Any], sizes: Sequence[int]) -> None:
        self.compiled = model
        self.sizes = list(sizes)
        self._pads = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a batch of any size."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = _batch_of(leaves)
        bucket = next((size for size in self.sizes if batch is not None and size >= batch), None)
        if not self._pads or batch is None or bucket is None or bucket == batch:
            return self.compiled(*args, **kwargs)
        padded_args, padded_kwargs = pytree.tree_unflatten([_pad(leaf, bucket) for leaf in leaves], spec)
        output = self.compiled(*padded_args, **padded_kwargs)
        values, out_spec = pytree.tree_flatten(output)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not all(value.dim() and value.shape[0] == bucket for value in tensors):
            self._pads = False
            return self.compiled(*args, **kwargs)
        cut = [value[:batch] if isinstance(value, torch.Tensor) else value for value in values]
        return pytree.tree_unflatten(cut, out_spec)

    def __getattr__(self, name: str) -> Any:
        if name == "compiled":
            raise AttributeError(name)
        return getattr(self.compiled, name)


def _batch_of(leaves: Sequence[Any]) -> int | None:
    """The first dimension that all tensors share; None where they do not."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size or None


def _pad(leaf: Any, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(size - leaf.shape[0], *leaf.shape[1:])])
