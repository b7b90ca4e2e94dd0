"""PyTorch's modes during a call of the model: whether gradients are recorded, and the dtype of autocast."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchserve_openvino.backend.runtime.compare import output_tensors


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
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return cls(torch.is_grad_enabled(), kind)

    @classmethod
    def of_call(cls, inputs: Any) -> "Modes":
        """Returns the modes in which to serve a handler's call: gradients only if an input requires them.

        Many handlers forget `torch.no_grad`, although no gradients of their answers are used.
        """
        current = cls.now()
        if not current.grad or any(tensor.requires_grad for tensor in output_tensors(inputs)):
            return current
        return replace(current, grad=False)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Runs the context in these modes."""
        enabled = self.autocast is not None
        # Entering autocast takes longer than all else here, and mostly changes nothing.
        changes = enabled or torch.is_autocast_enabled("cpu")
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.grad),
            torch.autocast("cpu", self.autocast or torch.bfloat16, enabled) if changes else nullcontext(),
        ):
            yield


SERVING = Modes()
