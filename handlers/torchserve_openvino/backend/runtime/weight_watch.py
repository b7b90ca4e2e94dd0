"""Detects whether the weights that became constants of a compiled graph have changed.

Dynamo reuses one graph for several modules of the same code, and does not guard a parameter's content, so each call
checks. It compares four facts, each because the others miss something: identity (another module's weights, or
``load_state_dict(assign=True)``), version counter (in-place changes that autograd tracks), data pointer
(``param.data = other``) and sampled bytes (``param.data.mul_()``, which torch does not track). There are three samples,
at the start, in the middle and at the end of each weight's memory; each call compares one of them in turn. Small
weights are compared whole.
Limit: a call does not notice a change through ``.data`` outside the bytes that it compares, and a change outside all
three samples is never noticed; call ``torch.compiler.reset()`` after such a change.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

_version = operator.attrgetter("_version")
_SAMPLE_BYTES = 32


def _samples(tensor: torch.Tensor) -> list[memoryview]:
    """Returns views of a few bytes at the start, in the middle and at the end of a tensor's memory."""
    # In memory order, whatever that of the dimensions; gaps between the elements of a slice belong to the same storage.
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((steps + 1 if tensor.numel() else 0,), (1,))
    view = memory.view(torch.uint8).numpy().data
    if len(view) <= 3 * _SAMPLE_BYTES:
        return [view] * 3
    last = len(view) - _SAMPLE_BYTES
    return [view[start : start + _SAMPLE_BYTES] for start in (0, last // 2, last)]


def can_watch(tensor: object) -> bool:
    """Checks whether changes to a tensor can be detected.

    An inference tensor has no version counter; one whose memory has other numbers than the tensor has no bytes to see.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_conj())


class WeightWatch:
    """Watches a list of tensors for changes, without keeping them alive.

    Args:
        tensors: The weights, in the order in which calls pass them.
        on_death: Called when one of them is freed, before its id can be reused.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], on_death: Callable[[], None]) -> None:
        self.ids = list(map(id, tensors))
        self._versions = list(map(_version, tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        places = list(zip(*map(_samples, tensors), strict=True))
        self._samples = itertools.cycle([(views, b"".join(views)) for views in places] or [((), b"")])
        self._refs = [weakref.ref(tensor, lambda _: on_death()) for tensor in tensors]

    def same_objects(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Checks whether these are the watched tensors themselves."""
        return list(map(id, tensors)) == self.ids

    def unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Checks whether the content is unchanged; valid only if `same_objects` holds."""
        views, content = next(self._samples)
        return (
            list(map(_version, tensors)) == self._versions
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and b"".join(views) == content
        )
