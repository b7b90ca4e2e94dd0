"""Selects the requests to run again, and copies what that takes."""

import hashlib
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.runtime.compare import comparable, copied, output_tensors
from torchserve_openvino.cache.identity.weights_digest import tensor_digest
from torchserve_openvino.serving.modes import Modes
from torchserve_openvino.serving.shapes.input_spec import Inputs

_PLAIN = (type(None), bool, int, float, str)


class Sampler:
    """Picks a share of the calls at random: exact in the long run, and at most one call off at any time.

    One call is picked in each stretch of ``1 / share`` calls, at an unpredictable position.

    Args:
        share: 0..1.
        seed: For tests; random otherwise.
    """

    def __init__(self, share: float, seed: int | None = None) -> None:
        self._share = share
        self._random = random.Random(os.urandom(16) if seed is None else seed)
        self._lock = threading.Lock()
        self._position = 0.0
        self._stretch = 0
        self._next = self._random.random()

    def picks(self) -> bool:
        """Returns whether to pick this call."""
        with self._lock:
            self._position += self._share
            if self._position < self._next or not self._share:
                return False
            self._stretch += 1
            self._next = self._stretch + self._random.random()
            return True


@dataclass
class SampledCall:
    """A copy of one call and its answer.

    Attributes:
        inputs: What the caller passed.
        inference: Whether inference mode was on.
        grad: Whether gradients were enabled.
        autocast: The dtype that autocast computed in; None where it was off.
        weights: `weight_versions` at the time of the call.
        output: Tensors of the answer that was sent.
        size: Bytes of all tensors.
    """

    inputs: Inputs
    inference: bool
    grad: bool
    autocast: torch.dtype | None
    weights: tuple[Any, ...]
    size: int
    output: list[torch.Tensor] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Identifies the inputs; the same in every process."""
        leaves, spec = pytree.tree_flatten(self.inputs)
        hasher = hashlib.sha256(str(spec).encode())
        for leaf in leaves:
            hasher.update((tensor_digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)).encode())
        return hasher.hexdigest()[:16]


def copied_inputs(inputs: Inputs) -> Inputs:
    """Returns a copy of the call whose tensors are not inference tensors.

    Raises:
        TypeError: An input is of a kind that is not copied.
    """
    for leaf in pytree.tree_leaves(inputs):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise TypeError(f"an input holds a {type(leaf).__name__}")
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.device.type != "cpu"):
            raise TypeError(f"an input is {leaf.layout} on {leaf.device}")
    with torch.inference_mode(False), torch.no_grad():
        copies: Inputs = copied(inputs)
    for tensor in output_tensors(copies):
        tensor.requires_grad_(False)
    return copies


def sample_of(inputs: Inputs, model: Callable[..., Any]) -> SampledCall:
    """Returns a copy of the call as a sample without output, which `answered` adds.

    Raises:
        TypeError: An input is of a kind that is not copied.
    """
    modes = Modes.now()
    return SampledCall(
        inputs=copied_inputs(inputs),
        inference=torch.is_inference_mode_enabled(),
        grad=modes.grad,
        autocast=modes.autocast,
        weights=weight_versions(model),
        size=tensor_bytes(inputs),
    )


def answered(sample: SampledCall, output: Any) -> SampledCall:
    """Adds a copy of the call's answer to the sample and returns it."""
    with torch.inference_mode(False), torch.no_grad():
        sample.output = [tensor.detach().clone() for tensor in comparable(output)]
    sample.size += tensor_bytes(sample.output)
    return sample


def tensor_bytes(tree: Any) -> int:
    """Returns the size of all tensors in a structure, in bytes."""
    return sum(t.numel() * t.element_size() for t in output_tensors(tree))


def weight_versions(model: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns each weight's address and version counter, which does not count writes through ``.data``."""
    if not isinstance(model, torch.nn.Module):
        return ()
    weights = (*model.parameters(), *model.buffers())
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in weights)
