"""Runs calls of our own backends: guarded at first, and without guards once the model is frozen."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchserve_openvino.backend.backend_settings import BackendSettings, RunningPartition
from torchserve_openvino.backend.routes.call_cache import CallCache
from torchserve_openvino.backend.routes.frozen import FrozenCalls, GraphCall, Key, Route, call_key
from torchserve_openvino.backend.routes.route_proof import RouteProof
from torchserve_openvino.backend.runners.guarded import Runner, TracedModel, is_exported
from torchserve_openvino.backend.runtime.execute import FallbackPartition
from torchserve_openvino.backend.runtime.own_weights import give_pages_back
from torchserve_openvino.backend.spec import own_inputs
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.errors import WeightsReleasedError

logger = logging.getLogger(__name__)


class FreezingRunner(Runner):
    """Runs calls through Dynamo, and those of a frozen model by recorded routes, which may come from the cache.

    Args:
        model: The model.
        trace: Creates the traced model.
        settings: Settings of the backend.
        calls: The cache of calls, for a frozen model; None without a cache.
        proves: Whether the result of a cached call is first compared with eager PyTorch's.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        trace: Callable[[], TracedModel],
        settings: BackendSettings,
        calls: CallCache | None,
        proves: bool,
    ) -> None:
        super().__init__(model, trace, settings.tracker)
        self._settings = settings
        self._calls = calls
        self._proves = proves
        self._frozen: FrozenCalls | None = None
        self._lock = threading.RLock()
        # Cache keys of the signatures that were stored after their first call, which the second call may refute.
        self._stored: dict[Key, str] = {}
        # Calls that the eager model answers, because it is faster.
        self._eager_calls: set[Key] = set()

    @property
    def freezes(self) -> bool:
        """See `Runner`."""
        return self._frozen is not None

    @property
    def frozen(self) -> int:
        """See `Runner`."""
        return self._frozen.recorded if self._frozen is not None else 0

    @property
    def guarded_reasons(self) -> dict[str, int]:
        """See `Runner`."""
        return dict(self._frozen.refused) if self._frozen is not None else {}

    @property
    def released(self) -> bool:
        """See `Runner`."""
        return self._settings.eager_copy.released

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Runner`."""
        if self._frozen is None:
            if self._eager_calls and call_key(args, kwargs) in self._eager_calls:
                return self.model(*args, **kwargs)
            return self._guarded(args, kwargs)
        key, leaves, recorded = self._frozen.find(args, kwargs)
        if self._eager_calls and key in self._eager_calls:
            return self.model(*args, **kwargs)
        if recorded is not None:
            return recorded(leaves)
        if key is None:
            return self._guarded(args, kwargs)
        if self._frozen.settled(key):
            return self._recorded(self._frozen, key, leaves, args, kwargs)[0]
        # One thread at a time: two that trace a signature at the same moment would record different graphs.
        with self._lock:
            if self._frozen.settled(key):
                return self(args, kwargs)
            if self._calls is not None and not self._frozen.known(key):
                return self._first(self._calls, self._frozen, key, leaves, args, kwargs)
            result, _ = self._recorded(self._frozen, key, leaves, args, kwargs)
            if (
                self._calls is not None
                and self._frozen.candidate(key) is None
                and (stored := self._stored.pop(key, ""))
            ):
                # The second call took another route: the model keeps state that was not detected before.
                self._calls.discard(stored)
            return result

    def _recorded(
        self, frozen: FrozenCalls, key: Key, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[GraphCall]]:
        """Makes a guarded call, and records it if it can be captured as one graph."""
        if self.released or is_exported(args, kwargs) or frozen.parted(key):
            return self._guarded(args, kwargs), []
        traced, recorder = self._traced, self._settings.recorder
        runs = recorder.graph_calls
        failure: Exception | None = None
        with recorder.recording() as calls:
            try:
                result = (traced.whole or traced.call)(*args, **kwargs)
            except Exception as error:
                if traced.whole is None or recorder.graph_calls != runs:
                    raise
                failure = error
        if failure is not None:
            from torchserve_openvino.backend.capture.whole import why_not_whole

            # None of the call has run yet. If the error is the caller's fault, this raises it again.
            result = self._guarded(args, kwargs)
            frozen.part(key, why_not_whole(failure))
            return result, []
        if own_inputs(self.model, leaves):
            # Dynamo makes one input of both; another call of this shape has a tensor of its own.
            return result, []
        frozen.record(key, leaves, calls, result)
        return result, calls

    def _first(
        self,
        calls: CallCache,
        frozen: FrozenCalls,
        key: Key,
        leaves: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Makes a signature's first call: by a verified route from the cache, or traced, stored and confirmed later."""
        fields = calls.fields(key)
        # Without weights, eager PyTorch can't be compared with.
        if fields is None or self.released:
            return self._recorded(frozen, key, leaves, args, kwargs)[0]
        entry = make_key("call", fields)
        with calls.lock(entry):
            route = calls.load(entry, fields)
            if route is not None:
                result, is_proof = self._proven(route, leaves, args, kwargs)
                if result is not None:
                    if is_proof:
                        frozen.put(key, route)
                        calls.accept(entry)
                    return result[0]
                calls.reject(entry)
            answer, recorded = self._recorded(frozen, key, leaves, args, kwargs)
            route = frozen.candidate(key)
            if route is not None and recorded[0].blueprint is not None:
                calls.save(entry, fields, route, recorded[0].blueprint)
                self._stored[key] = entry
        return answer

    def _proven(
        self, route: Route, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any] | None, bool]:
        """Returns the result of a route from the cache, None if it is wrong, and whether that is a proof."""
        proof = RouteProof(self.model, self._tracker, self.poisoned)
        result, problem = proof.run(route, leaves, (args, kwargs), compares=self._proves)
        if problem:
            logger.warning("A cached model is rejected and compiled again: %s", problem)
            return None, False
        if proof.is_proof or not self._proves:
            self._tracker.cache.verified += self._proves
            if self._settings.resolved.options.verify == "first":
                self._settings.comparison.count()
        return (result,), proof.is_proof or not self._proves

    @property
    def running(self) -> Mapping[FallbackPartition, RunningPartition]:
        """See `CompiledModule.running`."""
        return dict(self._settings.running)

    def fall_back_to_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See `CompiledModule.fall_back_to_eager`."""
        key = call_key(args, kwargs)
        if key is not None:
            self._eager_calls.add(key)
        return key is not None

    def freeze(self) -> None:
        """See `CompiledModule.freeze`."""
        self._frozen = FrozenCalls()
        if self._calls is not None:
            # The model may have changed since it was frozen before.
            self._calls.describe_anew()

    def poisoned(self) -> AbstractContextManager[None]:
        """See `CompiledModule.poisoned`."""
        return self._settings.memory.poison()

    def reject_cached(self) -> bool:
        """See `CompiledModule.reject_cached`."""
        return self._calls is not None and self._calls.reject_used()

    def confirm_cached(self) -> None:
        """See `CompiledModule.confirm_cached`."""
        if self._calls is not None:
            self._tracker.cache.verified = self._tracker.cache.call_hits
            # Nobody compares the shapes that arrive from now on.
            self._proves = True

    def release_weights(self) -> None:
        """See `CompiledModule.release_weights`."""
        if reason := self._why_weights_are_needed():
            raise WeightsReleasedError(f"the weights are still needed: {reason}")
        assert isinstance(self.model, torch.nn.Module)
        self._settings.eager_copy.released = True
        if "_traced" in vars(self):
            self._traced.release_weights()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def give_memory_back(self) -> int:
        """See `CompiledModule.give_memory_back`."""
        partitions = self._settings.partitions
        return give_pages_back(partitions.mapped) if partitions is not None else 0

    def in_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See `Runner`."""
        if self._frozen is None or self._calls is None:
            return False
        key, _, _ = self._frozen.find(args, kwargs)
        fields = self._calls.fields(key) if key is not None else None
        return fields is not None and self._calls.has(make_key("call", fields))

    def drop(self) -> None:
        """See `Runner`."""
        super().drop()
        if self._frozen is not None:
            # Its routes run what was compiled.
            self._frozen = FrozenCalls()
        for entry in self._stored.values():
            assert self._calls is not None
            self._calls.discard(entry)

    def _why_weights_are_needed(self) -> str | None:
        if not isinstance(self.model, torch.nn.Module):
            return "only a module on OpenVINO can do without them"
        if not self._settings.own_weights:
            return "the compiled model shares them (own_weights is False)"
        if self._frozen is None or not self._frozen.recorded or self._frozen.refused:
            refused = ", ".join(self._frozen.refused) if self._frozen is not None else ""
            return f"calls run guarded{': ' + refused if refused else ', freeze() and call first'}"
        summary = self.report.summary
        if summary.coverage < 1.0 or summary.graph_breaks:
            left = summary.ops_total - summary.ops_on_openvino
            return f"{left} op(s) run in eager, {summary.graph_breaks} graph break(s)"
        return None
