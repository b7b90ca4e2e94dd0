"""Creates compiled models: for `entry.compile`, and for serving and the doctor, which need more settings."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from torchserve_openvino.backend.backend_settings import BackendSettings, converter_of, cpp_compiler
from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.conversion.mapped_ops import Twin
from torchserve_openvino.backend.instrumentation import NOT_INSTRUMENTED, Instrumentation
from torchserve_openvino.backend.routes.call_cache import CallCache
from torchserve_openvino.backend.routes.frozen import CallRecorder
from torchserve_openvino.backend.routes.partition_cache import PartitionCache
from torchserve_openvino.backend.runners.first_calls import FirstCalls
from torchserve_openvino.backend.runners.freezing import FreezingRunner
from torchserve_openvino.backend.runners.guarded import Runner, TracedModel
from torchserve_openvino.backend.runtime.crashes.journal import Journal, journal_in
from torchserve_openvino.backend.spec import OpenAxes
from torchserve_openvino.backend.torchscript.lines import UntranslatableError
from torchserve_openvino.backend.torchscript.python_form import (
    PythonForm,
    ScriptedMethod,
    is_scripted,
    python_form,
    run_as_it_is,
    while_unchanged,
)
from torchserve_openvino.backend.upstream._openvino_private import use_libraries
from torchserve_openvino.cache.identity.fingerprint import mappings_digest
from torchserve_openvino.cache.open import CacheSettings, Store, open_cache, state_folder
from torchserve_openvino.config import ResolvedOptions, resolve_options, vocabulary
from torchserve_openvino.errors import ConfigError, TorchScriptModelError
from torchserve_openvino.ops.mappings import Mappings, registered
from torchserve_openvino.quantized.torch_fx import UnknownLayerError, decomposed, is_quantized_by_fx
from torchserve_openvino.report import Tracker

if TYPE_CHECKING:
    from torchserve_openvino.backend.capture.whole import WholeCapture

# Each static shape is one compilation; with Dynamo's default of 8, a ninth batch size would always run in eager.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class CompileSpec:
    """How a model is compiled.

    Attributes:
        dynamic: As in `entry.compile`, like ``options``, ``fullgraph``, ``mode``, ``backend`` and ``methods``.
        resolved: Options that are already validated, used instead of ``options``.
        own_weights: Whether the compiled model keeps its own copy of the weights, for `CompiledModule.release_weights`.
        cache: Settings of the cache beyond ``model_caching`` and ``cache_dir``.
        instrumentation: Hooks for a diagnosis; the cache must be off if they leave nodes out.
        cautious: Whether each partition is first compiled in a process of its own, since the compiler may die.
        open_axes: Input sizes that stay symbolic; the backend ``export`` still makes one graph for each shape.
        captures: Keeps what is captured, by `sizes` as text, for other calls of `compile_with` with the same
            model and other properties of OpenVINO; by default it is captured for this one alone.
    """

    dynamic: bool | None = False
    options: Mapping[str, Any] | None = None
    fullgraph: bool = False
    mode: str | None = None
    backend: str = "openvino"
    methods: tuple[str, ...] = ()
    resolved: ResolvedOptions | None = None
    own_weights: bool = False
    cache: CacheSettings = field(default_factory=CacheSettings)
    instrumentation: Instrumentation = NOT_INSTRUMENTED
    cautious: bool = False
    open_axes: OpenAxes | None = None
    captures: "dict[str, WholeCapture] | None" = None

    @property
    def sizes(self) -> dict[str, Any]:
        """What decides for which sizes a graph is made, JSON-safe."""
        return {"dynamic": self.dynamic} | ({"open_axes": self.open_axes.to_plain()} if self.open_axes else {})


def compile_with(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker | None = None) -> CompiledModule:
    """Wraps a model so that it is compiled at its first call.

    Args:
        model: A module or function on the CPU.
        spec: How to compile it.
        tracker: Collects the records, in addition to those that it already holds; a new one if None.

    Raises:
        ConfigError: The backend is gone, an option is unknown or can't be used, or the model has no such method; before
            anything is compiled.
        CacheDirectoryError: The cache's folder is not safe to use.
        TorchScriptModelError: A TorchScript module with a backend that is not ours, which can't trace it.
    """
    if spec.backend in vocabulary.REMOVED:
        raise ConfigError(vocabulary.REMOVED[spec.backend], key="backend")
    if is_scripted(model) and spec.backend not in vocabulary.OURS:
        raise TorchScriptModelError(
            f"The backend {spec.backend} can't trace TorchScript and would run it unchanged. Use one of "
            f"{', '.join(vocabulary.COMPILING)}, or pass the original nn.Module."
        )
    if isinstance(model, CompiledModule):
        model = model.eager
    tracker = tracker or Tracker()
    # What was captured is this model's.
    others = replace(spec, captures=None)
    methods = {name: compile_with(_method(model, name), replace(others, methods=()), tracker) for name in spec.methods}
    return CompiledModule(_runner(model, spec, tracker), functools.partial(compile_with, spec=others), methods)


def _method(model: Callable[..., Any], name: str) -> Callable[..., Any]:
    method = getattr(model, name, None)
    if isinstance(model, torch.jit.ScriptModule) and isinstance(method, torch.ScriptMethod):
        return ScriptedMethod(model, name)
    if not inspect.ismethod(method) or method.__self__ is not model or hasattr(torch.nn.Module, name):
        raise ConfigError(f"names {name!r}, which is no method of {type(model).__name__} itself.", key="methods")
    return method


def _runner(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker) -> Runner:
    if spec.backend not in vocabulary.OURS:
        return _foreign(model, spec, tracker)
    resolved = spec.resolved or resolve_options(spec.options)
    settings = make_settings(resolved, tracker, spec)
    form: PythonForm | None = None
    if is_scripted(model):
        try:
            form = python_form(model)
        except UntranslatableError as error:
            return Runner(model, functools.partial(TracedModel, run_as_it_is(model, error, tracker)), tracker)
    calls = CallCache(form or model, settings, spec.sizes) if settings.partitions is not None else None
    captured = form or _in_plain_tensors(model, tracker)
    traced, sync = _twin(captured, settings.mappings)
    if spec.backend == "export":
        if traced is not captured:
            tracker.add_note("mappings of modules have no effect with the backend export: it captures their operators")
        capture = functools.partial(_export, captured, spec, settings)
    else:
        capture = functools.partial(_trace, traced, sync, spec, settings)
    if form is not None:
        capture = functools.partial(_watched, capture, model, form, tracker)
    verifies = resolved.options.verify == "first"
    compared = (lambda: FirstCalls(model, settings).wrap(capture())) if verifies else capture
    return FreezingRunner(model, compared, settings, calls, proves=spec.cache.proves or verifies)


def make_settings(resolved: ResolvedOptions, tracker: Tracker, spec: CompileSpec) -> BackendSettings:
    """Returns the settings of one of our backends; loads libraries, opens the cache, and fills in the report."""
    mappings, backend = registered(), vocabulary.canonical(spec.backend)
    use_libraries(mappings.libraries)
    store = open_cache(resolved.options.cache_dir if resolved.options.model_caching else None, spec.cache)
    journal = journal_in(state_folder(store), alarmed=spec.cautious)
    settings = BackendSettings(
        resolved,
        tracker,
        fallback_to=_possible_fallback(resolved.options.fallback_to, tracker),
        own_weights=spec.own_weights,
        partitions=_open_partitions(store, resolved, tracker, spec, mappings, converter_of(backend), journal),
        journal=journal,
        mappings=mappings,
        instrumentation=spec.instrumentation,
        backend=backend,
    )
    hint = settings.ov_config.get("INFERENCE_PRECISION_HINT", "")
    tracker.config.update(
        backend=backend,
        options=resolved.to_dict(),
        ov_config={name: str(value) for name, value in settings.ov_config.items()},
        effective_device=settings.device,
        effective_precision=str(hint) or "chosen by the device",
    )
    if not resolved.options.aot_autograd:
        tracker.add_note("aot_autograd: false has no effect: this backend always lowers through AOTAutograd")
    return settings


def _possible_fallback(fallback: str, tracker: Tracker) -> str:
    if fallback == "inductor" and cpp_compiler() is None:
        tracker.add_note(
            "fallback to inductor was requested, but no C++ compiler is on PATH; using eager PyTorch instead"
        )
        return "eager"
    return fallback


def _open_partitions(
    store: Store | None,
    resolved: ResolvedOptions,
    tracker: Tracker,
    spec: CompileSpec,
    mappings: Mappings,
    converter: str,
    journal: Journal | None,
) -> PartitionCache | None:
    """Returns the cache; None if it is off, or if a mapping can't be part of its keys."""
    options = resolved.options
    if store is None:
        return None
    own, packaged = (None, store.root) if store.read_only else (store.root, store.packaged)
    tracker.cache.directory = str(own or "")
    tracker.cache.packaged = str(packaged or "")
    mapped, unknown = mappings_digest(mappings)
    for what in unknown:
        tracker.cache.refused[f"{what} can't be made part of the key, so nothing is cached"] += 1
    if unknown:
        return None
    tracker.cache.enabled = True
    tracker.cache.events = store.events.to_dict
    return PartitionCache(
        store, options.device, options.ov_config(), tracker.cache, spec.cache.for_level, mapped, converter, journal
    )


def _foreign(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker) -> Runner:
    """Returns a runner for any other backend of torch.compile, which is passed through and reported."""
    tracker.config.update(backend=spec.backend, options=dict(spec.options or {}), effective_device="CPU")
    passed: Any = {"mode": spec.mode} | ({"options": dict(spec.options)} if spec.options else {})

    def pass_through() -> TracedModel:
        from torchserve_openvino.backend.capture.frame_log import FrameLog
        from torchserve_openvino.backend.upstream import _torch_private as private

        foreign = torch.compile(model, backend=spec.backend, dynamic=spec.dynamic, fullgraph=spec.fullgraph, **passed)
        frame_log = FrameLog(tracker, CallRecorder(), spec.backend)
        private.watch_frames(foreign, frame_log, keeps_going=False)
        return TracedModel(functools.partial(frame_log.run, foreign))

    return Runner(model, pass_through, tracker)


def _watched(
    capture: Callable[[], TracedModel], model: Callable[..., Any], form: PythonForm, tracker: Tracker
) -> TracedModel:
    """Captures the Python form of a TorchScript model, whose attributes are compared before each guarded call."""
    traced = capture()
    return replace(traced, call=while_unchanged(traced.call, model, form, tracker))


def _export(model: Callable[..., Any], spec: CompileSpec, settings: BackendSettings) -> TracedModel:
    """Captures the model with torch.export."""
    from torchserve_openvino.backend.capture.export import ExportedModel

    exported = ExportedModel(model, settings, spec.dynamic)
    return TracedModel(exported, exported.release_weights, exported.drop)


def _trace(
    traced: Callable[..., Any], sync: Callable[..., Any], spec: CompileSpec, settings: BackendSettings
) -> TracedModel:
    """Captures the model with Dynamo.

    Args:
        traced: The model, or its twin (`_twin`).
        sync: Wraps the compiled form of ``traced``.
    """
    from torchserve_openvino.backend.capture.dynamo import OpenVINOBackend
    from torchserve_openvino.backend.capture.frame_log import FrameLog
    from torchserve_openvino.backend.capture.whole import WholeCapture
    from torchserve_openvino.backend.upstream import _torch_kept
    from torchserve_openvino.backend.upstream import _torch_private as private

    ours, frame_log = OpenVINOBackend(settings, traced), FrameLog(settings.tracker, settings.recorder)
    # Both are in torch 2.13's signature (tests/contract), not in its type stubs.
    limits: Any = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    compiled = torch.compile(traced, backend=ours, fullgraph=spec.fullgraph, **limits)
    around: Callable[[], AbstractContextManager[None]] = functools.partial(
        _torch_kept.kept_whole, spec.dynamic, settings.converter, {} if spec.dynamic else None,
        # Elsewhere Dynamo breaks the graph, and the sizes after the break are guarded like any other.
        selects=_torch_kept.suppresses_boxes(traced) and _torch_kept.take_boxes(),
    )  # fmt: skip
    mark: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial
    if spec.open_axes is not None:
        from torchserve_openvino.backend.upstream._torch_sizes import marking, open_ones

        around = open_ones(around) if spec.open_axes.ones else around
        mark = functools.partial(marking, open_axes=spec.open_axes)
    private.watch_frames(compiled, frame_log, keeps_going=not spec.fullgraph, around=around)
    captures, sizes = {} if spec.captures is None else spec.captures, repr(spec.sizes)
    if (whole := captures.get(sizes)) is None:
        whole = captures[sizes] = WholeCapture(traced, sync, settings, around, **limits)
    backends = ours, whole.backend

    def release_weights() -> None:
        for backend in backends:
            backend.release_weights(settings)

    def drop() -> None:
        for backend in backends:
            backend.drop(settings)

    call = mark(functools.partial(frame_log.run, sync(_without_wrapper(compiled))))
    return TracedModel(call, release_weights, drop, mark(whole.call_with(settings)))


def _without_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what ``torch.compile`` made of a module, without its wrapper module.

    The wrapper would call global hooks once more than eager does, and costs 40 us.
    """
    return compiled.forward if isinstance(compiled, torch.nn.Module) else compiled


def _in_plain_tensors(model: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    """Returns what to capture: the model, or the twin of one that computes on torch's quantized tensors."""
    if not is_quantized_by_fx(model):
        return model
    try:
        return decomposed(model)
    except UnknownLayerError as error:
        tracker.add_note(f"the model was quantized by torch.ao, and runs as it is: {error}")
        return model


def _twin(model: Callable[..., Any], mappings: Mappings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what to trace (the model, or a twin for mapped modules), and a wrapper for its compiled form."""
    if mappings.modules and Twin.needed(model, mappings):
        assert isinstance(model, torch.nn.Module)
        twin = Twin(model, mappings)
        return twin.model, twin.call
    return model, lambda compiled: compiled
