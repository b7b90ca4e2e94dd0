"""Calls that go through Dynamo's guards, or a foreign backend's: the base of all runners."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.errors import WeightsReleasedError
from torchserve_openvino.report import CompileReport, Tracker


def _nothing() -> None:
    """For what holds nothing of its own: eager PyTorch, a foreign backend."""


@dataclass(frozen=True)
class Traced:
    """The model through ``torch.compile`` or ``torch.export``.

    Attributes:
        release_weights: Lets its graphs go of the weights.
        drop: Lets them go of all that was compiled; they compile again if they are called.
        whole: For a call that is to be frozen: captures it as one graph, or raises before anything of it ran. None
            where ``call`` captures no other way.
    """

    call: Callable[..., Any]
    release_weights: Callable[[], None] = _nothing
    drop: Callable[[], None] = _nothing
    whole: Callable[..., Any] | None = None


def is_exported(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a part of a model that torch.export captures, which runs Python on stand-ins for tensors."""
    # The first says it of the whole process, whichever thread exports.
    return torch.compiler.is_exporting() and any(
        isinstance(leaf, torch.Tensor) and type(leaf) not in {torch.Tensor, torch.nn.Parameter}
        for leaf in pytree.tree_leaves((args, kwargs))
    )


class Runner:
    """Runs the calls of a compiled model; this one has no frozen calls and no cache.

    Args:
        model: The model.
        trace: Makes what goes through Dynamo.
        tracker: Where everything is counted.

    Attributes:
        model: As above.
        report: What ran where, and why; live.
        freezes: Whether calls run without guards once they were recorded.
        frozen: How many input signatures do so.
        guarded_reasons: Why others do not: reasons with the number of signatures.
        released: Whether the weights were freed.
    """

    def __init__(self, model: Callable[..., Any], trace: Callable[[], Traced], tracker: Tracker) -> None:
        self.model = model
        self.report = CompileReport(tracker)
        self._trace = trace
        self._tracker = tracker

    @property
    def freezes(self) -> bool:
        """See above."""
        return False

    @property
    def frozen(self) -> int:
        """See above."""
        return 0

    @property
    def guarded_reasons(self) -> dict[str, int]:
        """See above."""
        return {}

    @property
    def released(self) -> bool:
        """See above."""
        return False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model."""
        return self._guarded(args, kwargs)

    def inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call inside another model that is being captured: the model becomes part of that graph."""
        if self.released:
            raise WeightsReleasedError("the model cannot become part of another graph")
        return self.model(*args, **kwargs)

    def freeze(self) -> None:
        """See `CompiledModule.freeze`."""

    def poisoned(self) -> AbstractContextManager[None]:
        """See `CompiledModule.poisoned`."""
        return nullcontext()

    def reject_cached(self) -> bool:
        """See `CompiledModule.reject_cached`."""
        return False

    def confirm_cached(self) -> None:
        """See `CompiledModule.confirm_cached`."""

    def in_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of this frozen model would be taken from the cache."""
        return False

    def release_weights(self) -> None:
        """See `CompiledModule.release_weights`."""
        raise WeightsReleasedError("the weights are still needed: only a module that OpenVINO runs can do without")

    def give_memory_back(self) -> int:
        """See `CompiledModule.give_memory_back`."""
        return 0

    def drop(self) -> None:
        """Frees what was compiled, and forgets calls that it stored: another way to compile the model was preferred."""
        if "_traced" in vars(self):
            self._traced.drop()

    def settles(self, become: Callable[["Runner"], None]) -> None:
        """Takes what to call with another runner that replaces this one."""

    @functools.cached_property
    def _traced(self) -> Traced:
        """Made when a call first has to be traced: a worker that starts warm never imports Dynamo."""
        return self._trace()

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.released:
            raise WeightsReleasedError("this call was not compiled before the weights were released")
        if is_exported(args, kwargs):
            return self.inside(args, kwargs)
        return self._traced.call(*args, **kwargs)
