"""Everything that this package takes from OpenVINO's private modules; pinned by tests/contract/test_openvino.py.

OpenVINO 2026.4: the FX decoder and the support table are the parts of its torch.compile backend that work; they have no
public name. Importing them here does not import that backend, which would change torch._dynamo.config. They are
imported lazily: a worker that starts from the cache converts nothing.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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


def make_stateful(model: ov.Model, state: Mapping[str, str]) -> None:
    """Turns inputs that return as outputs into variables, which keep their value from call to call; in place.

    Args:
        model: Its inputs and outputs have names.
        kept: The output that becomes an input's next value, by name of the input.

    Raises:
        RuntimeError: A name is unknown.
    """
    apply_make_stateful_transformation(model, dict(state))


def page_attention(model: ov.Model) -> None:
    """Replaces the variables by a paged cache of keys and values, as OpenVINO GenAI does; in place.

    Raises:
        RuntimeError: Some attention does not have the form that this knows.
    """
    paged_attention_transformation(model)


# --- products of bfloat16 with results in float32: an operation of OpenVINO that has no public constructor --------
# Its MatMul and Convolution return the type of their operands. The CPU plugin has a form of them with another type of
# the result, ``TypeRelaxed``, which only an IR can create, once the plugin's library is added as an extension
# (OpenVINO 2026.4; tests/contract/test_openvino_bf16x3.py). So a node is read from a small IR, and gets its operands
# afterwards.


_TYPES = {"bf16": "BF16", "f32": "FP32"}


def keep_in_f32(node: ov.Node) -> None:
    """Makes the CPU plugin compute a node in float32, also where the rest of its model is computed in bfloat16.

    An IR marks such nodes by the attribute ``precise``, for which OpenVINO's Python interface has no function.
    """
    key, value = _precise()
    node.set_rt_info(value, key)


@functools.lru_cache(maxsize=1)
def _precise() -> tuple[str, Any]:
    """Returns what the mark is in memory, read from an IR of one marked node."""
    layers = [
        _input(0, 1, "f32"),
        '<layer id="1" name="marked" type="Exp" version="opset1"><rt_info><attribute name="precise" version="0"/>'
        f"</rt_info><input>{_port(0, 'f32', 1)}</input><output>{_port(1, 'f32', 1)}</output></layer>",
        _result(2, 1),
    ]
    model = _model_of(_ir(layers, [(0, 0, 1, 0), (1, 1, 2, 0)]))
    ((key, value),) = model.get_results()[0].input_value(0).get_node().get_rt_info().items()
    return key, value


def plugin_library() -> Path:
    """Returns the library of the CPU plugin.

    Raises:
        RuntimeError: It is not in OpenVINO's Python package.
    """
    name = "openvino_intel_cpu_plugin.dll" if sys.platform == "win32" else "libopenvino_intel_cpu_plugin.so"
    path = Path(ov.__file__).parent / "libs" / name
    if not path.is_file():
        raise RuntimeError(f"precision bf16x3 needs OpenVINO's CPU plugin at {path}; install the package openvino")
    return path


def product_in_f32(kind: str, first: ov.Output, second: ov.Output, attributes: Mapping[str, str]) -> ov.Output:
    """Returns the product of two values in bfloat16, in float32.

    Args:
        kind: ``MatMul`` or ``Convolution``.
        first: An operand of known rank; the second one, too.
        second: For a Convolution, the weights.
        attributes: Of the operation, as an IR writes them.
    """
    model = _template(kind, _rank(first), _rank(second), tuple(sorted(attributes.items())))
    node = model.get_results()[0].input_value(0).get_node()
    node.input(0).replace_source_output(first)
    node.input(1).replace_source_output(second)
    return node.output(0)


def _rank(value: ov.Output) -> int:
    return int(value.get_partial_shape().rank.get_length())


def _template(kind: str, first: int, second: int, attributes: tuple[tuple[str, str], ...]) -> ov.Model:
    use_libraries([plugin_library()])
    return _model_of(_text(kind, first, second, attributes))


def _model_of(text: bytes) -> ov.Model:
    return core().read_model(text, ov.Tensor(np.zeros(1, np.uint8)))


@functools.lru_cache(maxsize=64)
def _text(kind: str, first: int, second: int, attributes: tuple[tuple[str, str], ...]) -> bytes:
    """Returns an IR of one product of two inputs of these ranks."""
    own = " ".join(f'{name}="{value}"' for name, value in attributes)
    relaxed = f'<data type_relax="true" input_data_types="" output_data_types="f32" {own}/>'
    layers = [
        _input(0, first, "bf16"),
        _input(1, second, "bf16"),
        f'<layer id="2" name="product" type="{kind}" version="type_relaxed_opset1">{relaxed}<input>'
        f"{_port(0, 'bf16', first)}{_port(1, 'bf16', second)}</input>"
        f"<output>{_port(2, 'f32', max(first, second))}</output></layer>",
        _result(3, max(first, second)),
    ]
    return _ir(layers, [(0, 0, 2, 0), (1, 0, 2, 1), (2, 2, 3, 0)])


def _ir(layers: Sequence[str], edges: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Returns an IR of layers, and of edges from one's port to another one's."""
    joined = "".join(f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>' for a, b, c, d in edges)
    text = f'<net name="model" version="11"><layers>{"".join(layers)}</layers><edges>{joined}</edges></net>'
    return f'<?xml version="1.0"?>{text}'.encode()


def _result(index: int, rank: int) -> str:
    port = _port(0, "f32", rank)
    return f'<layer id="{index}" name="result" type="Result" version="opset1"><input>{port}</input></layer>'


def _input(index: int, rank: int, kind: str) -> str:
    shape = ",".join("?" * rank)
    return (
        f'<layer id="{index}" name="input{index}" type="Parameter" version="opset1">'
        f'<data shape="{shape}" element_type="{kind}"/><output>{_port(0, kind, rank)}</output></layer>'
    )


def _port(index: int, kind: str, rank: int) -> str:
    return f'<port id="{index}" precision="{_TYPES[kind]}">{"<dim>-1</dim>" * rank}</port>'
