"""Runs eager PyTorch in the background: it pauses between operators during a request, and has no side effects."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.module_state import module_state
from torchserve_openvino.backend.runtime.compare import comparable, copied
from torchserve_openvino.backend.upstream._torch_modes import ThreadDispatchMode
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.verification.sampling import SampledCall, weight_versions

# --- detects when no request is in progress, so that background work may start or continue ------------------------


class ShuttingDownError(BaseException):
    """The worker shuts down, so background work must stop. A `BaseException`, so that no model catches it."""


class IdleGate:
    """Tracks whether requests are in progress.

    Args:
        seconds: Idle time before it counts as quiet: an answer is sent only after it has left the handler.

    Attributes:
        waited: Seconds spent in `wait` so far, over all calls.
    """

    def __init__(self, seconds: float = 0.005) -> None:
        self.waited = 0.0
        self._seconds = seconds
        self._changed = threading.Condition()
        self._running = 0
        self._last = 0.0
        self._ended = False

    @property
    def disturbed(self) -> bool:
        """Whether `wait` would block or raise; takes no lock, so that it can be read often."""
        return self._running > 0 or self._ended or time.monotonic() < self._last + self._seconds

    def began(self) -> None:
        """Records that a request has started."""
        with self._changed:
            self._running += 1

    def ended(self) -> None:
        """Records that a request has been answered."""
        with self._changed:
            self._running -= 1
            self._last = time.monotonic()
            if not self._running:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits, which raise `ShuttingDownError`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Blocks until it is quiet.

        Raises:
            Ended: `close` was called.
        """
        start = time.monotonic()
        with self._changed:
            while not self._ended:
                left = self._last + self._seconds - time.monotonic()
                if not self._running and left <= 0:
                    break
                self._changed.wait(None if self._running else left)
            self.waited += time.monotonic() - start
            if self._ended:
                raise ShuttingDownError

    def pause(self, seconds: float) -> None:
        """Sleeps, whether or not requests are in progress.

        Raises:
            Ended: `close` was called.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._ended and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._ended:
                raise ShuttingDownError


# --- runs eager PyTorch in the background: it pauses between operators during a request, and has no side effects


# Arguments that turn an operator's dropout off when they are False or a probability of 0.
_SWITCHES = frozenset({"train", "training", "dropout", "dropout_p"})


class Unrepeatable(BaseException):
    """A second run would answer differently or change the model. A `BaseException`, so that no model catches it."""


class YieldToRequests(ThreadDispatchMode):
    """Lets requests go first at each operator, and stops a run that would draw random numbers or write to a weight.

    Args:
        quiet: Tracks whether a request is in progress; None never waits.
        model: Its weights must not be written to.
    """

    def __init__(self, quiet: IdleGate | None, model: Callable[..., Any]) -> None:
        super().__init__()
        self._quiet = quiet
        weights = (*model.parameters(), *model.buffers()) if isinstance(model, torch.nn.Module) else ()
        self._weights = {t.untyped_storage().data_ptr() for t in weights if t.layout is torch.strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Waits until it is quiet, then runs one operator."""
        kwargs = kwargs or {}
        if self._quiet is not None and self._quiet.disturbed:
            self._quiet.wait()
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise Unrepeatable(f"the model draws random numbers ({func})")
        if func._schema.is_mutable and self._writes_to_weight(func, args, kwargs):
            raise Unrepeatable(f"the model writes to its own weights or buffers ({func})")
        return func(*args, **kwargs)

    def _writes_to_weight(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if any(t.numel() and t.untyped_storage().data_ptr() in self._weights for t in written):
                return True
        return False


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Checks whether an operator that may draw random numbers does so: dropout can be off by its arguments."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _SWITCHES:
            default = argument.default_value if argument.has_default_value() else True
            if not (args[position] if position < len(args) else kwargs.get(argument.name, default)):
                return False
    return True


def run_again(model: Callable[..., Any], sample: SampledCall, quiet: IdleGate) -> list[torch.Tensor]:
    """Returns eager's answer to a sample, in the modes of the original call.

    Raises:
        Unrepeatable: It would not repeat the run, or would change the model.
        Ended: The worker shuts down.
    """
    kind = sample.autocast or torch.bfloat16
    with (
        torch.inference_mode(sample.inference),
        torch.set_grad_enabled(sample.grad),
        torch.autocast("cpu", dtype=kind, enabled=sample.autocast is not None),
        YieldToRequests(quiet, model),
    ):
        # Copied, because the model may write to its inputs, which are kept in case of a mismatch.
        args, kwargs = copied(sample.inputs)
        return [tensor.detach() for tensor in comparable(model(*args, **kwargs))]


def why_not(model: Callable[..., Any], inputs: Inputs) -> str:
    """Returns why a model can't be run again in eager PyTorch; empty where it can. Runs it once, without pausing."""
    if getattr(model, "training", False):
        return "the model is in training mode"
    args, kwargs = copied(inputs)
    before = _state(model)
    try:
        with torch.inference_mode(), YieldToRequests(None, model):
            model(*args, **kwargs)
    except Unrepeatable as reason:
        return str(reason)
    except Exception as error:
        # The model ran in verification before, so what fails is the interception of its operators.
        return f"the model fails when its operators are intercepted: {type(error).__name__}: {error}"
    return "the model keeps state between calls" if _state(model) != before else ""


def _state(model: Callable[..., Any]) -> Any:
    return (module_state(model), weight_versions(model)) if isinstance(model, torch.nn.Module) else None
