"""The entry points of the backend: `compile` for Python, `openvino_serving` for ``torch.compile(backend=...)``."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.compiler import CompileSpec, compile_with, make_settings
from torchserve_openvino.config import resolve_options
from torchserve_openvino.report import Tracker

if TYPE_CHECKING:
    from torch.fx import GraphModule


def compile(
    model: Callable[..., Any],
    *,
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    backend: str = "openvino",
    methods: Sequence[str] = (),
) -> CompiledModule:
    """Compiles a model through ``torch.compile`` with OpenVINO as the backend, and reports what ran where.

    Args:
        model: A module or function on the CPU; compilation happens at its first call.
        dynamic: As in ``torch.compile``: False makes one graph for each shape, True one for all, None lets Dynamo
            decide after the second shape.
        options: OpenVINO's own options: ``device``, ``aot_autograd``, ``model_caching``, ``cache_dir``,
            ``decompositions``, ``disabled_ops``, ``config``; and ``fallback_to``. Not modified.
        fullgraph: Raise an error at a graph break instead of continuing in Python.
        mode: For other backends only, as in ``torch.compile``.
        backend: ``openvino``; ``openvino_ts`` converts through TorchScript; ``export`` captures by torch.export. Any
            other backend of Dynamo is passed through and reported.
        methods: Names of the model's other methods that compute, such as ``encode_image``; each is compiled as the
            model is. A call of any other method that computes with weights is counted as a fallback.

    Raises:
        ConfigError: An option is unknown or can't be used, before anything is compiled.
        CacheDirectoryError: The cache's folder is not safe to use.
        TorchScriptModelError: A TorchScript module with a backend that is not ours, which can't trace it.
    """
    own_options = dict(options) if options is not None else None
    return compile_with(
        model,
        CompileSpec(
            dynamic=dynamic,
            options=own_options,
            fullgraph=fullgraph,
            mode=mode,
            backend=backend,
            methods=tuple(methods),
        ),
    )


def openvino_serving(
    gm: "GraphModule", example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Any:
    """The same backend for ``torch.compile(model, backend="openvino_serving", options={...})``.

    Dynamo finds it through the entry point group ``torch_dynamo_backends``. Fallbacks are logged as warnings; for a
    report use `compile`.
    """
    from torchserve_openvino.backend.capture.dynamo import OpenVINOBackend

    settings = make_settings(resolve_options(options), Tracker(), CompileSpec())
    return OpenVINOBackend(settings)(gm, example_inputs)
