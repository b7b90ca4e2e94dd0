"""Makes compiled models: what `entry.compile` offers to users, and what serving and the doctor need as well."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.conversion.mapped_modules import Twin
from torchserve_openvino.backend.instrumentation import NOT_INSTRUMENTED, Instrumentation
from torchserve_openvino.backend.open_axes import OpenAxes
from torchserve_openvino.backend.routes.call_cache import CallCache
from torchserve_openvino.backend.routes.partition_cache import PartitionCache
from torchserve_openvino.backend.routes.recorder import CallRecorder
from torchserve_openvino.backend.runners.choosing import ChoosingRunner
from torchserve_openvino.backend.runners.freezing import FreezingRunner
from torchserve_openvino.backend.runners.guarded import Runner, Traced
from torchserve_openvino.backend.settings import BackendSettings, converter_of, cpp_compiler
from torchserve_openvino.backend.upstream._openvino_private import use_libraries
from torchserve_openvino.cache.identity.mapping_print import mappings_digest
from torchserve_openvino.cache.open import CacheSettings, open_cache
from torchserve_openvino.config import ResolvedOptions, backends, resolve_options
from torchserve_openvino.errors import TorchScriptModelError
from torchserve_openvino.ops.mappings import Mappings, registered
from torchserve_openvino.report import Tracker

# Each static shape is one compilation; Dynamo's default of 8 would send the ninth batch size to eager for good.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class CompileSpec:
    """How a model is compiled.

    Attributes:
        dynamic: As `entry.compile` takes it, and so are ``options``, ``fullgraph``, ``mode`` and ``backend``.
        resolved: Options that were validated before, instead of ``options``.
        own_weights: Whether the compiled model keeps its own copy of the weights, for `CompiledModule.release_weights`.
        cache: More about the cache than ``model_caching`` and ``cache_dir`` say.
        instrumentation: Hooks of a diagnosis; the cache must be off where they leave nodes out.
        open_axes: Sizes that one graph leaves open; `export` makes one for each shape all the same.
    """

    dynamic: bool | None = False
    options: Mapping[str, Any] | None = None
    fullgraph: bool = False
    mode: str | None = None
    backend: str = "openvino"
    resolved: ResolvedOptions | None = None
    own_weights: bool = False
    cache: CacheSettings = field(default_factory=CacheSettings)
    instrumentation: Instrumentation = NOT_INSTRUMENTED
    open_axes: OpenAxes | None = None


def compile_with(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker | None = None) -> CompiledModule:
    """Compiles a model at its first call.

    Args:
        model: A module or function on the CPU.
        spec: How.
        tracker: Where everything is counted, beside what else is counted there; a new one if None.

    Raises:
        ConfigError: An option is unknown or can't be used, before anything is compiled.
        CacheDirectoryError: The cache's folder is not safe to use.
        TorchScriptModelError: A TorchScript module, which Dynamo can't trace.
    """
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TorchScriptModelError(
            "torch.compile can't trace TorchScript and would run it unchanged. Pass the original nn.Module, or export "
            "it with torch.export.export and load that."
        )
    if isinstance(model, CompiledModule):
        model = model.eager
    return CompiledModule(_runner(model, spec, tracker or Tracker()), functools.partial(compile_with, spec=spec))


def _runner(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker) -> Runner:
    if spec.backend not in backends.OURS:
        return _foreign(model, spec, tracker)
    resolved = spec.resolved or resolve_options(spec.options)
    if spec.backend == "auto":
        return _choosing(model, replace(spec, resolved=resolved))
    settings = make_settings(resolved, tracker, spec)
    shapes = {"dynamic": spec.dynamic} | ({"open_axes": spec.open_axes.to_plain()} if spec.open_axes else {})
    calls = CallCache(model, settings, shapes) if settings.partitions is not None else None
    traced, sync = _twin(model, settings.mappings)
    if spec.backend == "export":
        if traced is not model:
            tracker.add_note("mappings of modules have no effect with the backend export: it sees their operators")
        capture = functools.partial(_export, model, spec, settings)
    else:
        capture = functools.partial(_trace, traced, sync, spec, settings)
    return FreezingRunner(model, capture, settings, calls, spec.cache.proves)


def make_settings(resolved: ResolvedOptions, tracker: Tracker, spec: CompileSpec) -> BackendSettings:
    """Settings of one of our own backends, with its libraries loaded and its cache open; the report states them."""
    mappings, backend = registered(), backends.canonical(spec.backend)
    use_libraries(mappings.libraries)
    settings = BackendSettings(
        resolved,
        tracker,
        fallback_to=_possible_fallback(resolved.options.fallback_to, tracker),
        own_weights=spec.own_weights,
        partitions=_open_partitions(resolved, tracker, spec, mappings, converter_of(backend)),
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


def _possible_fallback(asked: str, tracker: Tracker) -> str:
    if asked == "inductor" and cpp_compiler() is None:
        tracker.add_note("fallback to inductor was asked for, but no C++ compiler is on PATH: eager is used")
        return "eager"
    return asked


def _open_partitions(
    resolved: ResolvedOptions, tracker: Tracker, spec: CompileSpec, mappings: Mappings, converter: str
) -> PartitionCache | None:
    """The cache, where one is wanted and possible."""
    options = resolved.options
    store = open_cache(options.cache_dir if options.model_caching else None, spec.cache)
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
        store, options.device, options.ov_config(), tracker.cache, spec.cache.for_level, mapped, converter
    )


def _foreign(model: Callable[..., Any], spec: CompileSpec, tracker: Tracker) -> Runner:
    """Another backend of torch.compile, passed through and reported."""
    tracker.config.update(backend=spec.backend, options=dict(spec.options or {}), effective_device="CPU")
    passed: Any = {"mode": spec.mode} | ({"options": dict(spec.options)} if spec.options else {})

    def pass_through() -> Traced:
        from torchserve_openvino.backend.capture.books import FrameBooks
        from torchserve_openvino.backend.upstream import _torch_private as private

        foreign = torch.compile(model, backend=spec.backend, dynamic=spec.dynamic, fullgraph=spec.fullgraph, **passed)
        books = FrameBooks(tracker, CallRecorder(), spec.backend)
        private.watch_frames(foreign, books, keeps_going=False)
        return Traced(functools.partial(books.run, foreign))

    return Runner(model, pass_through, tracker)


def _choosing(model: Callable[..., Any], spec: CompileSpec) -> Runner:
    """The backend ``auto``."""
    ways = {
        name: functools.partial(_runner, model, replace(spec, backend=name), Tracker()) for name in backends.COMPILING
    }
    return ChoosingRunner(model, ways)


def _export(model: Callable[..., Any], spec: CompileSpec, settings: BackendSettings) -> Traced:
    """Captures by torch.export."""
    from torchserve_openvino.backend.capture.export import ExportedModel

    exported = ExportedModel(model, settings, spec.dynamic)
    return Traced(exported, exported.release_weights, exported.drop)


def _trace(
    traced: Callable[..., Any], sync: Callable[..., Any], spec: CompileSpec, settings: BackendSettings
) -> Traced:
    """Captures by Dynamo.

    Args:
        traced: The model, or its twin (`_twin`).
        sync: What the compiled form goes through.
    """
    from torchserve_openvino.backend.capture.books import FrameBooks
    from torchserve_openvino.backend.capture.dynamo import OpenVINOBackend
    from torchserve_openvino.backend.routes.whole import capture_whole
    from torchserve_openvino.backend.upstream import _torch_private as private
    from torchserve_openvino.backend.upstream._torch_kept import kept_whole

    ours, books = OpenVINOBackend(settings, traced), FrameBooks(settings.tracker, settings.recorder)
    # Both are in torch 2.13's signature (tests/contract), not in its type stubs.
    limits: Any = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    compiled = torch.compile(traced, backend=ours, fullgraph=spec.fullgraph, **limits)
    around: Callable[[], AbstractContextManager[None]] = functools.partial(kept_whole, spec.dynamic)
    mark: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial
    if spec.open_axes is not None:
        from torchserve_openvino.backend.upstream._torch_sizes import marking, open_ones

        around = open_ones(around) if spec.open_axes.ones else around
        mark = functools.partial(marking, open_axes=spec.open_axes)
    private.watch_frames(compiled, books, keeps_going=not spec.fullgraph, around=around)
    whole = capture_whole(traced, ours, books, around, **limits)
    return Traced(
        mark(functools.partial(books.run, sync(_without_wrapper(compiled)))),
        ours.release_weights,
        ours.drop,
        mark(functools.partial(books.run, sync(whole))),
    )


def _without_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` made of a module, without the module around it.

    That one would call global hooks once more than eager does, and costs 40 us.
    """
    return compiled.forward if isinstance(compiled, torch.nn.Module) else compiled


def _twin(model: Callable[..., Any], mappings: Mappings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What is traced in the model's place, and what its compiled form goes through: both only for mapped modules."""
    if mappings.modules and Twin.needed(model, mappings):
        assert isinstance(model, torch.nn.Module)
        twin = Twin(model, mappings)
        return twin.model, twin.call
    return model, lambda compiled: compiled
