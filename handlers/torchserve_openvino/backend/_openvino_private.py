"""Everything that this package takes from OpenVINO's private modules; pinned by tests/contract/test_openvino.py.

OpenVINO 2026.4: its FX decoder and its support table are the parts of its torch.compile backend that work; they have no
public name. Importing them here does not import that backend, which would change torch._dynamo.config. They are
imported when they are needed: a worker that starts from the cache converts nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import openvino as ov
import torch


@functools.lru_cache(maxsize=1)
def core() -> ov.Core:
    """The process's one Core: devices are opened once, and CompiledModels share its plugin."""
    return ov.Core()


@functools.lru_cache(maxsize=1)
def upstream_supported() -> frozenset[str]:
    """Names in OpenVINO's own Python support table, without ``torch.ops.``."""
    from openvino.frontend.pytorch.torchdynamo.op_support import OperatorSupport

    names = OperatorSupport({})._support_dict
    return frozenset(name.removeprefix("torch.ops.").removeprefix("_") for name in names)


@functools.lru_cache(maxsize=1)
def kept_whole() -> tuple[Any, ...]:
    """Operators that OpenVINO's export path does not decompose, because its frontend converts them better whole."""
    from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose

    return tuple(ops_to_not_decompose())


class _IndexedNodes(list["torch.fx.Node"]):
    """A node list whose ``index`` takes constant time; the decoder calls it once for each argument of each node."""

    def __init__(self, nodes: Sequence["torch.fx.Node"]) -> None:
        super().__init__(nodes)
        self._position = {node: i for i, node in enumerate(nodes)}

    def index(self, node: "torch.fx.Node", *_: Any) -> int:
        return self._position[node]


def fx_to_model(
    gm: "torch.fx.GraphModule", shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[ov.Model, Any]:
    """Converts an FX graph of ATen operators.

    Args:
        gm: Placeholders are the inputs; ``get_attr`` tensors become constants that share the tensors' memory.
        shapes: Shape of each placeholder, -1 for a dynamic dimension, ``[]`` for an integer.
        dtypes: Type of each placeholder.

    Returns:
        The model, and the decoder, which must live as long as the model: constants share its tensors' memory.

    Raises:
        RuntimeError: An operator has no conversion, or its translator failed; the message names it.
    """
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder(gm, input_shapes=[list(s) for s in shapes], input_types=list(dtypes))
    decoder._nodes = _IndexedNodes(decoder._nodes)
    frontend = FrontEndManager().load_by_framework("pytorch")
    return frontend.convert(frontend.load(decoder)), decoder


def ts_to_model(traced: torch.jit.ScriptModule) -> tuple[ov.Model, Any]:
    """Converts what TorchScript traced; `openvino.convert_model` does the same with telemetry around it.

    Args:
        traced: Tensors in it become constants that share the tensors' memory.

    Returns:
        The model, and the decoder, which must live as long as the model.

    Raises:
        OpConversionFailure: An operator has no conversion, or its translator failed; the message names it as
            ``aten::relu``.
    """
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    decoder = TorchScriptPythonDecoder(traced)
    frontend = FrontEndManager().load_by_framework("pytorch")
    return frontend.convert(frontend.load(decoder)), decoder
