"""Everything that this package takes from OpenVINO's private modules; pinned by tests/contract/test_openvino.py.

OpenVINO 2026.4: the FX decoder and the support table are the parts of its torch.compile backend that work; they have no
public name. Importing them here does not import that backend, which would change torch._dynamo.config. They are
imported lazily: a worker that starts from the cache converts nothing.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from openvino._offline_transformations import (
    apply_make_stateful_transformation,
    apply_moc_transformations,
    paged_attention_transformation,
)

from torchserve_openvino.errors import OpMappingError


@functools.lru_cache(maxsize=1)
def core() -> ov.Core:
    """Returns the only Core of the process, so that devices are opened once and CompiledModels share its plugin."""
    return ov.Core()


@functools.lru_cache(maxsize=1)
def upstream_supported() -> frozenset[str]:
    """Returns the names in OpenVINO's own Python support table, without ``torch.ops.``."""
    from openvino.frontend.pytorch.torchdynamo.op_support import OperatorSupport

    names = OperatorSupport({})._support_dict
    return frozenset(name.removeprefix("torch.ops.").removeprefix("_") for name in names)


@functools.lru_cache(maxsize=1)
def undecomposed() -> tuple[Any, ...]:
    """Returns the operators that OpenVINO's export path keeps whole, because its frontend converts them better so."""
    from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose

    return tuple(ops_to_not_decompose())


class _IndexedNodes(list["torch.fx.Node"]):
    """A node list with constant-time ``index``, which the decoder calls once per argument of each node."""

    def __init__(self, nodes: Sequence["torch.fx.Node"]) -> None:
        super().__init__(nodes)
        self._position = {node: i for i, node in enumerate(nodes)}

    def index(self, node: "torch.fx.Node", *_: Any) -> int:
        return self._position[node]


# Maps the context of a node (`openvino.frontend.NodeContext`) to its outputs (`openvino.Output`).
Translator = Callable[[Any], list[Any]]


@functools.lru_cache(maxsize=16)
def _add_to_core(library: Path) -> None:
    core().add_extension(str(library))


def use_libraries(libraries: Sequence[Path]) -> None:
    """Registers the operations of extension libraries, so that models with them can be read and compiled.

    Raises:
        OpMappingError: A file is not an extension library of this OpenVINO version.
    """
    for library in libraries:
        try:
            _add_to_core(library)
        except RuntimeError as error:
            raise OpMappingError(
                f"op_mappings: {library.name} is not an extension library of OpenVINO {ov.__version__}: {error}"
            ) from error


def _frontend(libraries: Sequence[Path] = ()) -> Any:
    from openvino.frontend import FrontEndManager

    frontend = FrontEndManager().load_by_framework("pytorch")
    for library in libraries:
        frontend.add_extension(str(library))
    return frontend


@functools.lru_cache(maxsize=4)
def _probed_frontend(libraries: tuple[Path, ...]) -> Any:
    return _frontend(libraries)


@functools.lru_cache(maxsize=4096)
def frontend_converts(name: str, libraries: tuple[Path, ...] = ()) -> bool:
    """Checks whether OpenVINO's C++ frontend has a conversion rule for an operator; takes about a millisecond.

    Its table has no public name, so a graph of only this operator is converted: for an unknown operator the frontend
    reports that it found no conversion rule; for others it may fail because arguments are missing.

    Args:
        name: Overload, such as ``aten.relu.default``; it need not exist in this version of torch.
        libraries: Extension libraries with conversions of their own.
    """
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    graph = torch.fx.Graph()
    node = graph.call_function(_named(name), (graph.placeholder("x"),))
    graph.output((node,))
    gm = torch.fx.GraphModule({}, graph)
    decoder = TorchFXPythonDecoder(gm, input_shapes=[[2, 3]], input_types=[torch.float32])
    frontend = _probed_frontend(libraries)
    try:
        frontend.convert(frontend.load(decoder))
    except Exception as error:
        # OpConversionFailure, or whatever a translator raises for missing arguments, which means that there is a rule.
        return "No conversion rule found" not in str(error)
    return True


def _named(name: str) -> Callable[..., Any]:
    """Returns a target for an FX node that the decoder takes for the operator ``name``."""

    class _Target:
        __name__ = name.replace(".", "_")
        __module__ = "torchserve_openvino"

        def __call__(self, *args: Any) -> Any:
            raise NotImplementedError(f"{name} stands for a conversion only")

        def __str__(self) -> str:
            return name

    return _Target()


def call_translator(graph: "torch.fx.Graph", name: str, inputs: Sequence["torch.fx.Node"]) -> "torch.fx.Node":
    """Adds a node that the `Translator` of this name converts; its arguments can only be nodes."""
    return graph.call_function(_named(name), tuple(inputs))


def fx_to_model(
    gm: "torch.fx.GraphModule",
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    translators: Sequence[tuple[str, Translator]] = (),
    libraries: Sequence[Path] = (),
) -> tuple[ov.Model, Any]:
    """Converts an FX graph of ATen operators.

    Args:
        gm: Placeholders are the inputs; ``get_attr`` tensors become constants that share the tensors' memory.
        shapes: Shape of each placeholder: -1 for a dynamic dimension, ``[]`` for an integer.
        dtypes: Dtype of each placeholder.
        translators: Names and translators for nodes from `call_translator`.
        libraries: Extension libraries with conversions of their own.

    Returns:
        The model, and the decoder, which must live as long as the model: constants share its tensors' memory.

    Raises:
        RuntimeError: An operator has no conversion, or its translator failed; the message names it.
    """
    from openvino.frontend import ConversionExtension
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder(gm, input_shapes=[list(s) for s in shapes], input_types=list(dtypes))
    decoder._nodes = _IndexedNodes(decoder._nodes)
    frontend = _frontend(libraries)
    for name, translate in translators:
        frontend.add_extension(ConversionExtension(name, translate))
    return frontend.convert(frontend.load(decoder)), decoder


def ts_to_model(traced: torch.jit.ScriptModule, libraries: Sequence[Path] = ()) -> tuple[ov.Model, Any]:
    """Converts a TorchScript trace; `openvino.convert_model` does the same, but with telemetry.

    Args:
        traced: The traced module; its tensors become constants that share the tensors' memory.
        libraries: Extension libraries with conversions of their own.

    Returns:
        The model, and the decoder, which must live as long as the model.

    Raises:
        OpConversionFailure: An operator has no conversion, or its translator failed; the message names it as
            ``aten::relu``.
    """
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    decoder = TorchScriptPythonDecoder(traced)
    frontend = _frontend(libraries)
    return frontend.convert(frontend.load(decoder)), decoder


def exported_to_model(program: "torch.export.ExportedProgram") -> tuple[ov.Model, Any]:
    """Converts an exported program whole; `openvino.convert_model` does the same, but with telemetry.

    Returns:
        The model, and the decoder, which must live as long as the model: constants share its tensors' memory.

    Raises:
        OpConversionFailure: An operator has no conversion, or it failed; the message names it.
    """
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
    from torch.export.decomp_utils import CustomDecompTable

    table = CustomDecompTable()
    for op in undecomposed():
        table.pop(op, None)
    decoder = TorchFXPythonDecoder(program.run_decompositions(table).module(check_guards=False), dynamic_shapes=True)
    decoder._nodes = _IndexedNodes(decoder._nodes)
    frontend = _frontend()
    model = frontend.convert(frontend.load(decoder))
    # Fuses and folds; `page_attention` finds attention in this form only.
    apply_moc_transformations(model, cf=False, smart_reshape=True)
    return model, decoder


def fuse_normalization(model: ov.Model) -> None:
    """Makes BatchNorm behind a convolution part of its weights, as every plugin does; in place."""
    apply_moc_transformations(model, cf=False, smart_reshape=False)


def make_stateful(model: ov.Model, kept: Mapping[str, str]) -> None:
    """Turns inputs that return as outputs into variables, which keep their value from call to call; in place.

    Args:
        model: Its inputs and outputs have names.
        kept: The output that becomes an input's next value, by name of the input.

    Raises:
        RuntimeError: A name is unknown.
    """
    apply_make_stateful_transformation(model, dict(kept))


def page_attention(model: ov.Model) -> None:
    """Replaces the variables by a paged cache of keys and values, as OpenVINO GenAI does; in place.

    Raises:
        RuntimeError: Some attention does not have the form that this knows.
    """
    paged_attention_transformation(model)
