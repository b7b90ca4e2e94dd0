"""Products of bfloat16 with results in float32: an operation of OpenVINO that has no public constructor.

Its MatMul and Convolution return the type of their operands. The CPU plugin has a form of them with another type of the
result, ``TypeRelaxed``, which only an IR can create, once the plugin's library is added as an extension
(OpenVINO 2026.4; tests/contract/test_openvino_bf16x3.py). So a node is read from a small IR, and gets its operands
afterwards.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov

from torchserve_openvino.backend.upstream._openvino_private import core, use_libraries

_TYPES = {"bf16": "BF16", "f32": "FP32"}


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
    return core().read_model(_text(kind, first, second, attributes), ov.Tensor(np.zeros(1, np.uint8)))


@functools.lru_cache(maxsize=64)
def _text(kind: str, first: int, second: int, attributes: tuple[tuple[str, str], ...]) -> bytes:
    """Returns an IR of one product of two inputs of these ranks."""
    own = " ".join(f'{name}="{value}"' for name, value in attributes)
    relaxed = f'<data type_relax="true" input_data_types="" output_data_types="f32" {own}/>'
    layers = [
        _input(0, first),
        _input(1, second),
        f'<layer id="2" name="product" type="{kind}" version="type_relaxed_opset1">{relaxed}<input>'
        f"{_port(0, 'bf16', first)}{_port(1, 'bf16', second)}</input>"
        f"<output>{_port(2, 'f32', max(first, second))}</output></layer>",
        f'<layer id="3" name="result" type="Result" version="opset1"><input>{_port(0, "f32", max(first, second))}'
        "</input></layer>",
    ]
    edges = [(0, 0, 2, 0), (1, 0, 2, 1), (2, 2, 3, 0)]
    joined = "".join(f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>' for a, b, c, d in edges)
    text = f'<net name="product" version="11"><layers>{"".join(layers)}</layers><edges>{joined}</edges></net>'
    return f'<?xml version="1.0"?>{text}'.encode()


def _input(index: int, rank: int) -> str:
    shape = ",".join("?" * rank)
    return (
        f'<layer id="{index}" name="input{index}" type="Parameter" version="opset1">'
        f'<data shape="{shape}" element_type="bf16"/><output>{_port(0, "bf16", rank)}</output></layer>'
    )


def _port(index: int, kind: str, rank: int) -> str:
    return f'<port id="{index}" precision="{_TYPES[kind]}">{"<dim>-1</dim>" * rank}</port>'
