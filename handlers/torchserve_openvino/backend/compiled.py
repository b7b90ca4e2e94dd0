"""A compiled model as its user calls it: guarded by Dynamo, or frozen, then perhaps from the cache."""

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.stand_in import StandIn
from torchserve_openvino.backend.routes.call_cache import CallCache
from torchserve_openvino.backend.routes.frozen import FrozenCalls, GraphCall, Key, Route
from torchserve_openvino.backend.routes.proof import Proof
from torchserve_openvino.backend.runtime.pages import give_pages_back
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.errors import WeightsReleasedError
from torchserve_openvino.report import CompileReport, Tracker

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """For what holds nothing of its own: eager PyTorch, a foreign backend."""


def is_exported(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is a part of a model that torch.export captures, which runs Python on stand-ins for tensors."""
    # The first says it of the whole process, whichever thread exports.
    return torch.compiler.is_exporting() and any(
        isinstance(leaf, torch.Tensor) and type(leaf) not in {torch.Tensor, torch.nn.Parameter}
        for leaf in pytree.tree_leaves((args, kwargs))
    )


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


class CompiledModule(StandIn):
    """A compiled model: call it as the model itself; other attributes are the model's.

    Args:
        model: The model.
        trace: Makes what goes through Dynamo.
        tracker: Where everything is counted.
        foreign: Name of a backend that is not ours.
        settings: Of our backend.
        calls: The cache of calls, for a frozen model.
        proves: Whether a call from the cache is first compared with eager PyTorch.
        remake: Compiles another model as this one was, for a copy.

    Attributes:
        report: What ran where, and why; live.
        eager: The model that was compiled, unchanged.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        trace: Callable[[], Traced],
        tracker: Tracker,
        *,
        foreign: str | None = None,
        settings: BackendSettings | None = None,
        calls: CallCache | None = None,
        proves: bool = True,
        remake: Callable[[Any], "CompiledModule"] | None = None,
    ) -> None:
        # Written around `__setattr__`, which writes to the model.
        vars(self).update(eager=model, report=CompileReport(tracker))
        self._trace = trace
        self._tracker = tracker
        self._foreign = foreign
        self._settings = settings
        self._calls = calls
        self._proves = proves
        self._remake = remake
        self._frozen: FrozenCalls | None = None
        self._lock = threading.RLock()
        # Signatures that were stored after their first call, and are not confirmed yet.
        self._stored: dict[Key, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; compiles at the first call, and for each new shape, dtype or code path.

        Inside another model that is being captured the module itself is called, and becomes part of that graph.
        """
        if self._frozen is None:
            return self._guarded(args, kwargs)
        key, leaves, recorded = self._frozen.find(args, kwargs)
        if recorded is not None:
            return recorded(leaves)
        if key is None:
            return self._guarded(args, kwargs)
        if self._calls is not None and not self._frozen.known(key):
            return self._first(self._calls, self._frozen, key, leaves, args, kwargs)
        result, _ = self._recorded(self._frozen, key, leaves, args, kwargs)
        if self._calls is not None and self._frozen.candidate(key) is None and (stored := self._stored.pop(key, "")):
            # The second call took another way: the model keeps state that nothing showed.
            self._calls.discard(stored)
        return result

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        """A call inside another model that is being captured."""
        if self.released:
            raise WeightsReleasedError("the model cannot become part of another graph")
        return self.eager(*args, **kwargs)

    # By this name Dynamo finds what it shall trace instead (tests/contract/test_dynamo.py).
    __call__._torchdynamo_inline = _inside  # type: ignore[attr-defined]

    def _recorded(
        self, frozen: FrozenCalls, key: Key, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[GraphCall]]:
        """A guarded call that is written down, where it can be captured whole."""
        if self.released or is_exported(args, kwargs) or frozen.parted(key):
            return self._guarded(args, kwargs), []
        traced, thread = self._traced, self._tracker.thread
        calls: list[GraphCall] = []
        runs = thread.graph_calls
        thread.recording = calls
        try:
            result = (traced.whole or traced.call)(*args, **kwargs)
        except Exception as error:
            if traced.whole is None or thread.graph_calls != runs:
                raise
            failure: Exception | None = error
        else:
            failure = None
        finally:
            thread.recording = None
        if failure is not None:
            from torchserve_openvino.backend.routes.whole import why_not_whole

            # Nothing of the call ran yet. Where the error is the caller's, this raises it again.
            result = self._guarded(args, kwargs)
            frozen.part(key, why_not_whole(failure))
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
        """The first call of a signature: from the cache, proven, or traced and stored; the second confirms it."""
        with self._lock:
            if frozen.known(key):
                return self(*args, **kwargs)
            fields = calls.fields(key)
            if fields is None:
                return self._recorded(frozen, key, leaves, args, kwargs)[0]
            entry = make_key("call", fields)
            with calls.lock(entry):
                route = calls.load(entry, fields)
                if route is not None:
                    result = self._proven(route, leaves, args, kwargs)
                    if result is not None:
                        frozen.put(key, route)
                        calls.accept(entry)
                        return result[0]
                    calls.reject(entry)
                answer, made = self._recorded(frozen, key, leaves, args, kwargs)
                route = frozen.candidate(key)
                if route is not None and made[0].blueprint is not None:
                    calls.save(entry, fields, route, made[0].blueprint)
                    self._stored[key] = entry
            return answer

    def _proven(
        self, route: Route, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """The answer of a way from the cache, once eager PyTorch gave the same; None where it did not."""
        proof = Proof(self.eager, self._tracker, self.poisoned)
        result, problem = proof.run(route, leaves, (args, kwargs), compares=self._proves)
        if problem:
            logger.warning("A cached model is not used and compiled again: %s", problem)
            return None
        self._tracker.cache.verified += self._proves
        return (result,)

    def freeze(self) -> "CompiledModule":
        """Promises that the model will not change any more, and takes the guards out of the calls to come.

        After it, a change of weights, buffers, mode, attributes or globals of the model is not seen: answers stay
        those of the frozen state. Inputs are checked as before: a new shape or type is compiled. Calls that can't be
        repeated without Dynamo (a graph break, an output that is a view, a buffer that changes) stay guarded.
        """
        if self._foreign is None:
            self._frozen = FrozenCalls()
        return self

    def poisoned(self) -> AbstractContextManager[None]:
        """While it lasts, answers are written to memory full of NaN, so that unwritten memory shows in a comparison."""
        return self._settings.memory.poison() if self._settings is not None else nullcontext()

    @property
    def released(self) -> bool:
        """Whether `release_weights` freed the module's weights."""
        return self._settings is not None and self._settings.eager_copy.released

    def reject_cached(self) -> bool:
        """Throws away the entries of the cache that calls of this model use, because an answer is wrong.

        Returns:
            Whether there were any; compile the model again then.
        """
        return self._calls is not None and self._calls.reject_used()

    def confirm_cached(self) -> None:
        """Says that somebody compared the answers of all calls so far with eager PyTorch's."""
        if self._calls is not None:
            self._tracker.cache.verified = self._tracker.cache.call_hits

    @property
    def frozen(self) -> int:
        """How many input signatures run without guards; 0 before `freeze`."""
        return self._frozen.recorded if self._frozen is not None else 0

    @property
    def guarded_reasons(self) -> dict[str, int]:
        """Why calls stay guarded after `freeze`: reasons with the number of signatures."""
        return dict(self._frozen.refused) if self._frozen is not None else {}

    def release_weights(self) -> "CompiledModule":
        """Frees the module's parameters and buffers, which the frozen calls do not need.

        After it the module is empty, only the signatures recorded since `freeze` can be called, and nothing can fall
        back to eager PyTorch. Compile with ``own_weights=True`` to be able to.

        Raises:
            WeightsReleasedError: Something still needs them: the reason is in the message, and nothing was freed.
        """
        if reason := self._why_weights_are_needed():
            raise WeightsReleasedError(f"the weights are still needed: {reason}")
        assert self._settings is not None and isinstance(self.eager, torch.nn.Module)
        self._settings.eager_copy.released = True
        if "_traced" in vars(self):
            self._traced.release_weights()
        for tensor in (*self.eager.parameters(), *self.eager.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        return self

    def give_memory_back(self) -> int:
        """Gives back memory that holds the cache's files; call it once each shape has run, and weights are packed.

        Returns:
            Bytes.
        """
        partitions = self._settings.partitions if self._settings is not None else None
        return give_pages_back(partitions.mapped) if partitions is not None else 0

    def in_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of this frozen model would be taken from the cache."""
        if self._frozen is None or self._calls is None:
            return False
        key, _, _ = self._frozen.find(args, kwargs)
        fields = self._calls.fields(key) if key is not None else None
        return fields is not None and self._calls.has(make_key("call", fields))

    def drop(self) -> None:
        """Frees what was compiled, and forgets calls that it stored: another way to compile the model was preferred."""
        if "_traced" in vars(self):
            self._traced.drop()
        for entry in self._stored.values():
            assert self._calls is not None
            self._calls.discard(entry)

    def _why_weights_are_needed(self) -> str | None:
        if self._settings is None or not isinstance(self.eager, torch.nn.Module):
            return "only a module that OpenVINO runs can do without"
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

    @functools.cached_property
    def _traced(self) -> Traced:
        """Made when a call first has to be traced: a worker that starts warm never imports Dynamo."""
        return self._trace()

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.released:
            raise WeightsReleasedError("this call was not compiled before the weights were released")
        if is_exported(args, kwargs):
            return self._inside(*args, **kwargs)
        return self._traced.call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CompiledModule({self.eager!r})"
