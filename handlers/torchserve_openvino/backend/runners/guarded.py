"""Runs calls through Dynamo's guards, also with a foreign backend: the base of all runners."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.errors import WeightsReleasedError
from torchserve_openvino.report import CompileReport, Tracker

if TYPE_CHECKING:
    from torchserve_openvino.backend.backend_settings import RunningPartition
    from torchserve_openvino.backend.runtime.execute import FallbackPartition


def _nothing() -> None:
    """Does nothing; for eager PyTorch and foreign backends, which hold nothing to free."""


@dataclass(frozen=True)
class TracedModel:
    """The model through ``torch.compile`` or ``torch.export``.

    Attributes:
        release_weights: Makes the graphs drop the weights.
        drop: Frees everything that was compiled; it is compiled again if called.
        whole: Captures a call that is to be frozen as one graph, or raises before any of it runs. None if ``call``
            captures every call as one graph.
    """

    call: Callable[..., Any]
    release_weights: Callable[[], None] = _nothing
    drop: Callable[[], None] = _nothing
    whole: Callable[..., Any] | None = None


def is_exported(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Checks whether a call is part of a model that torch.export is capturing, which runs Python on fake tensors."""
    # `is_exporting` is true in the whole process, whichever thread exports.
    return torch.compiler.is_exporting() and any(
        isinstance(leaf, torch.Tensor) and type(leaf) not in {torch.Tensor, torch.nn.Parameter}
        for leaf in pytree.tree_leaves((args, kwargs))
    )


class Runner:
    """Runs the calls of a compiled model; this one has no frozen calls and no cache.

    Args:
        model: The model.
        trace: Creates the traced model.
        tracker: Collects the records.

    Attributes:
        model: As above.
        report: What ran where, and why; always up to date.
        freezes: Whether calls run without guards once they have been recorded.
        frozen: Number of input signatures that run without guards.
        guarded_reasons: Maps each reason why calls stay guarded to the number of signatures.
        released: Whether the weights were freed.
    """

    def __init__(self, model: Callable[..., Any], trace: Callable[[], TracedModel], tracker: Tracker) -> None:
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

    @property
    def running(self) -> "Mapping[FallbackPartition, RunningPartition]":
        """See `CompiledModule.running`."""
        return {}

    def fall_back_to_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See `CompiledModule.fall_back_to_eager`."""
        return False

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
        """Checks whether a call of this frozen model is in the cache."""
        return False

    def release_weights(self) -> None:
        """See `CompiledModule.release_weights`."""
        raise WeightsReleasedError("the weights are still needed: only a module on OpenVINO can do without them")

    def give_memory_back(self) -> int:
        """See `CompiledModule.give_memory_back`."""
        return 0

    def drop(self) -> None:
        """Frees what was compiled and discards the calls that it stored, because another backend was preferred."""
        if "_traced" in vars(self):
            self._traced.drop()

    @functools.cached_property
    def _traced(self) -> TracedModel:
        """The traced model, made when a call must first be traced: a worker that starts warm never imports Dynamo."""
        return self._trace()

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.released:
            raise WeightsReleasedError("this call was not compiled before the weights were released")
        if is_exported(args, kwargs):
            return self.inside(args, kwargs)
        return self._traced.call(*args, **kwargs)
