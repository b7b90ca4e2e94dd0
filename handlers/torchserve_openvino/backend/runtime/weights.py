"""Whether the weights that became constants of a compiled graph are still the ones that a call passes.

Dynamo reuses one graph for several modules of the same code, and does not guard a parameter's content, so each call
compares. Four facts are compared, each because the others miss something: identity (another module's weights, or
``load_state_dict(assign=True)``), version counter (changes in place that autograd tracks), data pointer
(``param.data = other``) and sampled bytes (``param.data.mul_()``, which torch tracks nowhere). Samples are taken at the
start, in the middle and at the end of each weight, at one of the three by each call in turn; small ones whole.
Limit: a change through ``.data`` outside the bytes that a call samples is not seen by that call, and one outside
all three places is never seen; call ``torch.compiler.reset()`` after it.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

_version = operator.attrgetter("_version")
_SAMPLE_BYTES = 32


def _samples(tensor: torch.Tensor) -> list[memoryview]:
    """Views on a few bytes at the start, in the middle and at the end of a tensor's memory."""
    if not tensor.is_contiguous() or tensor.numel() == 0:
        tensor = tensor.as_strided((1,), (1,), tensor.storage_offset()) if tensor.numel() else tensor.reshape(-1)
    view = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    if len(view) <= 3 * _SAMPLE_BYTES:
        return [view] * 3
    last = len(view) - _SAMPLE_BYTES
    return [view[start : start + _SAMPLE_BYTES] for start in (0, last // 2, last)]


def can_watch(tensor: object) -> bool:
    """Whether changes of a tensor can be noticed: an inference tensor has no version counter."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_inference() and tensor.layout is torch.strided


class WeightWatch:
    """Remembers a list of tensors without keeping them alive.

    Args:
        tensors: The weights, in the order in which calls pass them.
        on_death: Called when one of them is freed, before its id can be used again.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], on_death: Callable[[], None]) -> None:
        self.ids = list(map(id, tensors))
        self._versions = list(map(_version, tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        places = list(zip(*map(_samples, tensors), strict=True))
        self._samples = itertools.cycle([(views, b"".join(views)) for views in places] or [((), b"")])
        self._refs = [weakref.ref(tensor, lambda _: on_death()) for tensor in tensors]

    def same_objects(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the very tensors that were remembered."""
        return list(map(id, tensors)) == self.ids

    def unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether their content is still what it was; only to be asked of the same objects."""
        views, content = next(self._samples)
        return (
            list(map(_version, tensors)) == self._versions
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and b"".join(views) == content
        )
