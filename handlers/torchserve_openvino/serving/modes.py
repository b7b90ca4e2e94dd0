"""PyTorch's modes during a call of the model: whether gradients are recorded, and the dtype of autocast."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.backend.spec import plain_leaves


@dataclass(frozen=True)
class Modes:
    """The modes of one thread.

    Inference mode is treated as `torch.no_grad`. Both compute the same, but Dynamo's guards distinguish their tensors,
    so a model that was compiled in one mode would be compiled again in the other.

    Attributes:
        grad: Whether gradients are recorded.
        autocast: The dtype that autocast computes in on the CPU; None where it is off.
    """

    grad: bool = False
    autocast: torch.dtype | None = None

    @classmethod
    def now(cls) -> "Modes":
        """Returns the modes of the calling thread."""
        return _modes(torch.is_grad_enabled(), _autocast_dtype())

    @classmethod
    def of_call(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Modes":
        """Returns the modes in which to serve a handler's call: gradients only if an input requires them.

        Many handlers forget `torch.no_grad`, although no gradients of their answers are used.
        """
        if not torch.is_grad_enabled():
            return cls.now()
        leaves = plain_leaves(args, kwargs)
        tensors = output_tensors((args, kwargs)) if leaves is None else leaves
        return _modes(any(tensor.requires_grad for tensor in tensors), _autocast_dtype())

    def on(self) -> "_Entered":
        """Returns a context in which the thread has these modes."""
        return _Entered(self.grad, self.autocast)


SERVING = Modes()
# As few as there are, they are made once.
_modes = functools.cache(Modes)


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class _Entered:
    """A context in which the thread has some modes; what changes nothing is left out, since entering it takes time."""

    __slots__ = ("_before", "_changes", "_grad", "_kind")

    def __init__(self, grad: bool, kind: torch.dtype | None) -> None:
        self._grad, self._kind = grad, kind

    def __enter__(self) -> None:
        self._changes: list[Any] = []
        if torch.is_inference_mode_enabled():
            self._enter(torch.inference_mode(False))
        # Leaving inference mode sets it as well.
        self._before = torch.is_grad_enabled()
        if self._before is not self._grad:
            torch.set_grad_enabled(self._grad)
        if self._kind is not None or torch.is_autocast_enabled("cpu"):
            self._enter(torch.autocast("cpu", self._kind or torch.bfloat16, self._kind is not None))

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self._changes.append(context)

    def __exit__(self, *error: object) -> None:
        if torch.is_grad_enabled() is not self._before:
            torch.set_grad_enabled(self._before)
        for context in reversed(self._changes):
            context.__exit__(*error)
