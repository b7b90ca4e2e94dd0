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

    def on(self) -> "EnteredModes":
        """Returns a context in which the thread has these modes."""
        return EnteredModes(self)


SERVING = Modes()
# As few as there are, they are made once.
_modes = functools.cache(Modes)


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class EnteredModes:
    """A context in which the thread has some modes.

    Args:
        modes: The modes.
    """

    __slots__ = ("_autocast", "_grad", "_inference", "_modes")

    def __init__(self, modes: Modes) -> None:
        self._modes = modes

    def __enter__(self) -> None:
        # Whatever changes nothing is left out: each takes longer than looking up the route of a call.
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(self._modes.grad)
        kind = self._modes.autocast
        changes = kind is not None or torch.is_autocast_enabled("cpu")
        self._autocast = torch.autocast("cpu", kind or torch.bfloat16, kind is not None) if changes else None
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        torch.set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*error)
