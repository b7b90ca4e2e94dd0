"""PyTorch's modes around a call of the model: whether gradients are recorded, and what autocast computes in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchserve_openvino.backend.runtime.compare import output_tensors


@dataclass(frozen=True)
class Modes:
    """The modes of one thread.

    Inference mode is not told from `torch.no_grad`: Dynamo's guards tell their tensors apart, so a model that was
    compiled in one would be compiled again in the other. Whoever has either gets what both compute.

    Attributes:
        grad: Whether gradients are recorded.
        autocast: The type that autocast computes in on the CPU; None where it is off.
    """

    grad: bool = False
    autocast: torch.dtype | None = None

    @classmethod
    def now(cls) -> "Modes":
        """Those of the calling thread."""
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return cls(torch.is_grad_enabled(), kind)

    @classmethod
    def of_call(cls, inputs: Any) -> "Modes":
        """Those in which a handler's call of its model is served: gradients only where an input asks for them.

        Many handlers forget `torch.no_grad`, and nobody asks their answers for gradients.
        """
        found = cls.now()
        return replace(found, grad=found.grad and any(tensor.requires_grad for tensor in output_tensors(inputs)))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switches to them."""
        enabled = self.autocast is not None
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.grad),
            torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=enabled),
        ):
            yield


SERVING = Modes()
