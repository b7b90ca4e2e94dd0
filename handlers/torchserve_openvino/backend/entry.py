"""The doors to the backend: `compile` for Python, `openvino_serving` for ``torch.compile(backend=...)``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from torchserve_openvino.backend.call_cache import CallCache
from torchserve_openvino.backend.compiled import CompiledModule, Traced
from torchserve_openvino.backend.open_axes import OpenAxes
from torchserve_openvino.backend.probes import NO_PROBES, Probes
from torchserve_openvino.backend.settings import BackendSettings
from torchserve_openvino.cache.open import CacheSettings, open_cache
from torchserve_openvino.config import ResolvedOptions, resolve_options
from torchserve_openvino.errors import TorchScriptModelError
from torchserve_openvino.ops.mappings import Mappings
from torchserve_openvino.report import Tracker

if TYPE_CHECKING:
    from torch.fx import GraphModule

# What `openvino_serving` means in Python is `openvino`.
OWN_BACKENDS = {name: name for name in ("openvino", "openvino_ts", "export", "auto")} | {"openvino_serving": "openvino"}
# Each static shape is one compilation; Dynamo's default of 8 would send the ninth batch size to eager for good.
RECOMPILE_LIMIT = 64
DEFAULT_CACHE = CacheSettings()


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
    cache: CacheSettings = DEFAULT_CACHE,
    probes: Probes = NO_PROBES,
    tracker: Tracker | None = None,
    open_axes: OpenAxes | None = None,
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
        backend: ``openvino``; ``openvino_ts`` converts through TorchScript; ``export`` captures by torch.export;
            ``auto`` tries these at the first call and keeps the best. Any other that Dynamo knows is passed through,
            and reported.
        own_weights: Whether the compiled model keeps its own copy of the weights, for `CompiledModule.release_weights`.
        cache: More about the cache than ``model_caching`` and ``cache_dir`` say.
        resolved: Options that were validated before, instead of ``options``.
        probes: Hooks of a diagnosis; the cache must be off where they leave nodes out.
        tracker: Where everything is counted, beside what else is counted there; a new one if None.
        open_axes: Sizes that one graph leaves open; `export` makes one for each shape all the same.

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
    remake = functools.partial(
        compile, dynamic=dynamic, options=dict(options) if options is not None else None, fullgraph=fullgraph,
        mode=mode, backend=backend, resolved=resolved, own_weights=own_weights, cache=cache, probes=probes,
        open_axes=open_axes,
    )  # fmt: skip
    tracker = tracker or Tracker()
    if backend not in OWN_BACKENDS:
        tracker.config.update(backend=backend, options=dict(options or {}), effective_device="CPU")
        passed: Any = {"mode": mode, "options": dict(options)} if options else {"mode": mode}

        def pass_through() -> Traced:
            from torchserve_openvino.backend import _torch_private as private
            from torchserve_openvino.backend.books import FrameBooks

            foreign = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **passed)
            books = FrameBooks(tracker, backend)
            private.watch_frames(foreign, books, keeps_going=False)
            return Traced(functools.partial(books.run, foreign))

        return CompiledModule(model, pass_through, tracker, foreign=backend, remake=remake)
    resolved = resolved or resolve_options(options)
    if backend == "auto":
        from torchserve_openvino.backend.auto import CANDIDATES, ChoosingModule

        make = functools.partial(
            compile, model, dynamic=dynamic, fullgraph=fullgraph, resolved=resolved, own_weights=own_weights,
            cache=cache, probes=probes, open_axes=open_axes,
        )  # fmt: skip
        makers = {name: functools.partial(make, backend=name) for name in CANDIDATES}
        return ChoosingModule(model, makers, remake)
    settings = _settings(resolved, tracker, own_weights, cache, OWN_BACKENDS[backend])
    settings.probes = probes
    traced, sync = _twin(model, settings.mappings)

    def export() -> Traced:
        from torchserve_openvino.backend.export import ExportedModel

        if traced is not model:
            tracker.add_note("mappings of modules have no effect with the backend export: it sees their operators")
        exported = ExportedModel(model, settings, dynamic)
        return Traced(exported, exported.release_weights, exported.drop)

    def trace() -> Traced:
        from torchserve_openvino.backend import _torch_private as private
        from torchserve_openvino.backend._torch_kept import kept_whole
        from torchserve_openvino.backend.books import FrameBooks
        from torchserve_openvino.backend.capture import OpenVINOBackend
        from torchserve_openvino.backend.whole import capture_whole

        ours, books = OpenVINOBackend(settings, traced), FrameBooks(tracker)
        # Both are in torch 2.13's signature (tests/contract), not in its type stubs.
        limits: Any = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
        compiled = torch.compile(traced, backend=ours, fullgraph=fullgraph, **limits)
        around: Callable[[], AbstractContextManager[None]] = functools.partial(kept_whole, dynamic)
        mark: Callable[[Callable[..., Any]], Callable[..., Any]] = functools.partial
        if open_axes is not None:
            from torchserve_openvino.backend._torch_sizes import marking, open_ones

            around = open_ones(around) if open_axes.ones else around
            mark = functools.partial(marking, open_axes=open_axes)
        private.watch_frames(compiled, books, keeps_going=not fullgraph, around=around)
        whole = capture_whole(traced, ours, books, around, **limits)
        return Traced(
            mark(functools.partial(books.run, sync(_without_wrapper(compiled)))),
            ours.release_weights,
            ours.drop,
            mark(functools.partial(books.run, sync(whole))),
        )

    shapes = {"dynamic": dynamic} | ({"open_axes": open_axes.to_plain()} if open_axes is not None else {})
    calls = CallCache(model, settings, shapes) if settings.partitions is not None else None
    capture = export if backend == "export" else trace
    return CompiledModule(model, capture, tracker, settings=settings, calls=calls, proves=cache.proves, remake=remake)


def _without_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` made of a module, without the module around it.

    That one would call global hooks once more than eager does, and costs 40 us.
    """
    return compiled.forward if isinstance(compiled, torch.nn.Module) else compiled


def _twin(model: Callable[..., Any], mappings: Mappings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What is traced in the model's place, and what its compiled form goes through: both only for mapped modules."""
    if mappings.modules:
        from torchserve_openvino.backend.mapped_modules import Twin

        if Twin.needed(model, mappings):
            assert isinstance(model, torch.nn.Module)
            twin = Twin(model, mappings)
            return twin.model, twin.call
    return model, lambda compiled: compiled


def _settings(
    resolved: ResolvedOptions, tracker: Tracker, own_weights: bool, cache: CacheSettings, backend: str = "openvino"
) -> BackendSettings:
    options = resolved.options
    store = open_cache(options.cache_dir if options.model_caching else None, cache)
    if store is not None:
        tracker.cache.directory = str(store.primary.root) if store.primary is not None else ""
        tracker.cache.packaged = str(store.extra[0].root) if store.extra else ""
    return BackendSettings.of(resolved, tracker, own_weights, store, cache.for_level, backend)


def openvino_serving(
    gm: "GraphModule", example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Any:
    """The same backend for ``torch.compile(model, backend="openvino_serving", options={...})``.

    Dynamo finds it by the entry point group ``torch_dynamo_backends``. What falls back is logged as a warning; for the
    report use `compile`.
    """
    from torchserve_openvino.backend.capture import OpenVINOBackend

    return OpenVINOBackend(_settings(resolve_options(options), Tracker(), False, DEFAULT_CACHE))(gm, example_inputs)
