"""The doors to the backend: `compile` for Python, `openvino_serving` for ``torch.compile(backend=...)``."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchserve_openvino.backend._torch_private import FrameEvents, Mark
from torchserve_openvino.backend.capture import OpenVINOBackend
from torchserve_openvino.backend.frozen import FrozenCalls
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.config import ResolvedOptions, resolve_options
from torchserve_openvino.errors import TorchScriptModelError, WeightsReleasedError
from torchserve_openvino.report import CompileReport, Tracker
from torchserve_openvino.report.tracker import PartitionRecord

logger = logging.getLogger(__name__)

OWN_BACKENDS = frozenset({"openvino", "openvino_serving"})
# Each static shape is one compilation; Dynamo's default of 8 would send the ninth batch size to eager for good.
RECOMPILE_LIMIT = 64


class CompiledModule:
    """A compiled model: call it as the model itself; other attributes are the model's.

    Attributes:
        report: What ran where, and why; live.
        eager: The model that was compiled, unchanged.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        compiled: Callable[..., Any],
        tracker: Tracker,
        *,
        foreign: str | None = None,
        backend: OpenVINOBackend | None = None,
    ) -> None:
        self.eager = model
        self.report = CompileReport(tracker)
        self._compiled = compiled
        self._tracker = tracker
        self._foreign = foreign
        self._backend = backend
        self._frozen: FrozenCalls | None = None
        self._released = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; compiles at the first call, and for each new shape, dtype or code path."""
        if self._frozen is None:
            return self._guarded(args, kwargs)
        key, leaves, recorded = self._frozen.find(args, kwargs)
        if recorded is not None:
            return recorded(leaves)
        if key is None:
            return self._guarded(args, kwargs)
        thread = self._tracker.thread
        calls: list[Any] = []
        thread.recording = calls
        try:
            result = self._guarded(args, kwargs)
        finally:
            thread.recording = None
        self._frozen.record(key, leaves, calls, result)
        return result

    def freeze(self) -> "CompiledModule":
        """Promises that the model will not change any more, and takes the guards out of the calls to come.

        After it, a change of weights, buffers, mode, attributes or globals of the model is not seen: answers stay
        those of the frozen state. Inputs are checked as before: a new shape or type is compiled. Calls that can't be
        repeated without Dynamo (a graph break, an output that is a view, a buffer that changes) stay guarded.
        """
        if self._foreign is None:
            self._frozen = FrozenCalls()
        return self

    @property
    def released(self) -> bool:
        """Whether `release_weights` freed the module's weights."""
        return self._released

    @property
    def frozen(self) -> int:
        """How many input signatures run without guards; 0 before `freeze`."""
        return self._frozen.recorded if self._frozen is not None else 0

    def release_weights(self) -> "CompiledModule":
        """Frees the module's parameters and buffers, which the frozen calls do not need.

        After it the module is empty, only the signatures recorded since `freeze` can be called, and nothing can fall
        back to eager PyTorch. Compile with ``own_weights=True`` to be able to.

        Raises:
            WeightsReleasedError: Something still needs them: the reason is in the message, and nothing was freed.
        """
        if reason := self._why_weights_are_needed():
            raise WeightsReleasedError(f"the weights are still needed: {reason}")
        assert self._backend is not None and isinstance(self.eager, torch.nn.Module)
        self._backend.release_weights()
        self._released = True
        for tensor in (*self.eager.parameters(), *self.eager.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        return self

    def _why_weights_are_needed(self) -> str | None:
        if self._backend is None or not isinstance(self.eager, torch.nn.Module):
            return "only a module that OpenVINO runs can do without"
        if not self._backend.settings.own_weights:
            return "the compiled model shares them (own_weights is False)"
        if self._frozen is None or not self._frozen.recorded or self._frozen.refused:
            refused = ", ".join(self._frozen.refused) if self._frozen is not None else ""
            return f"calls run guarded{': ' + refused if refused else ', freeze() and call first'}"
        summary = self.report.summary
        if summary.coverage < 1.0 or summary.graph_breaks:
            left = summary.ops_total - summary.ops_on_openvino
            return f"{left} op(s) run in eager, {summary.graph_breaks} graph break(s)"
        return None

    def _guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._released:
            raise WeightsReleasedError("this call was not compiled before the weights were released")
        mark = FrameEvents.mark()
        runs = self._tracker.thread.graph_calls
        result = self._compiled(*args, **kwargs)
        ran = self._foreign is not None or self._tracker.thread.graph_calls != runs
        if FrameEvents.frames_seen() != mark.frames:
            self._harvest(mark, ran)
        if not ran:
            self._count_eager_call()
        return result

    def _count_eager_call(self) -> None:
        """No graph of ours ran: Dynamo skipped the model, gave up on it, or was told to."""
        reason = "Dynamo ran this call without any compiled graph"
        if self._tracker.last_failure:
            reason += f"; its last failure was: {self._tracker.last_failure}"
        if self._tracker.add_fallback("graph_break", "whole call", to="eager", reason=reason):
            logger.warning("Fallback: a whole call ran in eager PyTorch: %s", reason)

    def _harvest(self, mark: Mark, ran: bool) -> None:
        """Takes over what Dynamo recorded during a call in which it compiled something."""
        tracker = self._tracker
        for fact in FrameEvents.breaks_since(mark):
            tracker.add_graph_break(fact.reason, fact.where)
        for frame in FrameEvents.frames_since(mark):
            if frame.recompile_reason and not frame.failure:
                tracker.add_recompile(frame.where, frame.recompile_reason, frame.compile_id)
            if frame.failure:
                tracker.last_failure = frame.failure
                if ran:
                    op = frame.where or "a function"
                    tracker.add_fallback("graph_break", op, to="eager", reason=frame.failure, where=frame.where)
            if self._foreign is not None and frame.ops:
                record = tracker.add_graph(
                    compile_id=frame.compile_id, where=frame.where, stage="inference", ops_total=frame.ops
                )
                record.partitions.append(PartitionRecord(self._foreign, frame.ops, runs_on=self._foreign))

    def eval(self) -> "CompiledModule":
        """Puts the model into evaluation mode; the next call compiles for it."""
        return self.train(False)

    def train(self, mode: bool = True) -> "CompiledModule":
        """Sets the model's mode, as `torch.nn.Module.train`."""
        if isinstance(self.eager, torch.nn.Module):
            self.eager.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> "CompiledModule":
        """Moves or casts the model, as `torch.nn.Module.to`."""
        if isinstance(self.eager, torch.nn.Module):
            self.eager.to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "eager":
            raise AttributeError(name)
        return getattr(self.eager, name)

    def __repr__(self) -> str:
        return f"CompiledModule({self.eager!r})"


def compile(
    model: Callable[..., Any],
    *,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    backend: str = "openvino",
    resolved: ResolvedOptions | None = None,
    own_weights: bool = False,
) -> CompiledModule:
    """Compiles a model through ``torch.compile``, with OpenVINO as the backend, and keeps the books.

    Args:
        model: A module or function on the CPU; compilation happens at its first call.
        dynamic: As in ``torch.compile``: False makes one graph for each shape, True one for all, None lets Dynamo
            decide after the second shape.
        options: OpenVINO's own options: ``device``, ``aot_autograd``, ``model_caching``, ``cache_dir``,
            ``decompositions``, ``disabled_ops``, ``config``; and ``fallback_to``. Never changed.
        fullgraph: Raise at a graph break instead of going on in Python.
        mode: For other backends only, as in ``torch.compile``.
        backend: ``openvino``, or any backend that Dynamo knows; another one is passed through, and reported.
        own_weights: Whether the compiled model keeps its own copy of the weights, for `CompiledModule.release_weights`.
        resolved: Options that were validated before, instead of ``options``.

    Raises:
        ConfigError: An option is unknown or can't be used, before anything is compiled.
        TorchScriptModelError: A TorchScript module, which Dynamo can't trace.
    """
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TorchScriptModelError(
            "torch.compile can't trace TorchScript and would run it unchanged. Pass the original nn.Module, or export "
            "it with torch.export.export and load that."
        )
    tracker = Tracker()
    if backend not in OWN_BACKENDS:
        tracker.config.update(backend=backend, options=dict(options or {}), effective_device="CPU")
        passed: Any = {"mode": mode, "options": dict(options)} if options else {"mode": mode}
        compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **passed)
        return CompiledModule(model, compiled, tracker, foreign=backend)
    ours = OpenVINOBackend(BackendSettings.of(resolved or resolve_options(options), tracker, own_weights))
    # Both are in torch 2.13's signature (tests/contract), not in its type stubs.
    limits: Any = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    compiled = torch.compile(model, backend=ours, dynamic=dynamic, fullgraph=fullgraph, **limits)
    return CompiledModule(model, compiled, tracker, backend=ours)


def openvino_serving(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Any:
    """The same backend for ``torch.compile(model, backend="openvino_serving", options={...})``.

    Dynamo finds it by the entry point group ``torch_dynamo_backends``. What falls back is logged as a warning; for the
    report use `compile`.
    """
    return OpenVINOBackend(BackendSettings.of(resolve_options(options), Tracker()))(gm, example_inputs)
