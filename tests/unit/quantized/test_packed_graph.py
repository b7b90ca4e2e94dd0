"""Packed weights in OpenVINO's graph: the numbers of the dequantized layer, in kernels that take few bits."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as ops

from quantized_folders import Packing, packed, quantized
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.quantized.formats import read
from torchserve_openvino.quantized.layer import QuantizedLinear
from torchserve_openvino.quantized.pack_linears import (
    formats_of,
    name_weights,
    ordered,
    pack_linears,
    product,
    weight_formats,
)
from torchserve_openvino.quantized.scheme import scheme_of

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
PACKINGS = {
    "4 bits": Packing(),
    "asymmetric": Packing(symmetric=False, form="gptq_v2"),
    "act-order": Packing(symmetric=False, act_order=True),
    "whole rows": Packing(group_size=-1, symmetric=False),
    "8 bits": Packing(bits=8, symmetric=False),
    "awq": Packing("awq", symmetric=False),
}


def layer_of(packing: Packing, rows: int = 64, columns: int = 128, seed: int = 0) -> QuantizedLinear:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    scheme = scheme_of({"quantization_config": packing.config()})
    assert scheme is not None
    return read("layer", packed(quantized(weight, packing, seed), packing), scheme)


def compiled(model: ov.Model) -> ov.CompiledModel:
    return core().compile_model(model, "CPU", EXACT)


def kernels(model: ov.CompiledModel) -> dict[str, str]:
    """The types of weights that each matrix product takes, by name."""
    found = {}
    for node in model.get_runtime_model().get_ordered_ops():
        if node.get_rt_info()["layerType"].astype(str) in {"FullyConnected", "MatMul"}:
            source = node.input(1).get_source_output().get_node()
            found[node.get_friendly_name()] = source.get_rt_info()["outputPrecisions"].astype(str)
    return found


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_the_product_is_that_of_the_dequantized_weight_in_a_kernel_of_few_bits(packing: Packing) -> None:
    layer = layer_of(packing)
    x = ops.parameter([-1, 128], ov.Type.f32)
    blocked = layer.blocked()
    found = compiled(ov.Model([product(ordered(x.output(0), blocked.order), blocked, "layer")], [x]))
    given = np.random.default_rng(0).standard_normal((5, 128), dtype=np.float32)
    np.testing.assert_allclose(found(given)[0], given @ layer.dequantized().T, rtol=1e-5, atol=1e-4)
    assert set(kernels(found).values()) == {f"u{packing.bits}"}


def plain(layers: list[QuantizedLinear], *, by_row: bool = True) -> ov.Model:
    """A model that multiplies by the dequantized weights, all of the same input."""
    x = ops.parameter([-1, 128], ov.Type.f32)
    results = []
    for layer in layers:
        weight = layer.dequantized() if by_row else np.ascontiguousarray(layer.dequantized().T)
        results.append(ops.matmul(x, ops.constant(weight), False, by_row))
    model = ov.Model(results, [x])
    for place, port in enumerate(model.outputs):
        port.get_tensor().set_names({f"y{place}"})
    return model


@pytest.mark.parametrize("by_row", [True, False])
def test_weights_of_a_model_are_replaced(by_row: bool, tmp_path: Path) -> None:
    packing = Packing(act_order=True)
    layers = [layer_of(packing), layer_of(packing, rows=32, seed=1), layer_of(packing)]
    model = plain(layers, by_row=by_row)
    given = np.random.default_rng(0).standard_normal((3, 128), dtype=np.float32)
    wanted = list(compiled(model)(given).values())
    assert formats_of(model)["layers"] == {"f32": 3}
    pack_linears(model, [(f"layer{place}", layer) for place, layer in enumerate(layers)])
    found = compiled(model)
    for place, each in enumerate(wanted):
        np.testing.assert_allclose(found(given)[f"y{place}"], each, rtol=1e-5, atol=1e-4)
    assert formats_of(model) == {"layers": {"u4": 3}, "names": {"u4": ["layer0", "layer1"]}}
    kinds = [operation.get_type_name() for operation in model.get_ops()]
    assert kinds.count("Gather") == 2, "layers with the same input and order share one"
    ov.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    # 4 bits for each weight; a scale in 32 bits for each group of 32; an order of 128 columns.
    assert (tmp_path / "model.bin").stat().st_size < 160 * 128 * (0.5 + 4 / 32) + 4096


def test_names_of_weights() -> None:
    layers = [layer_of(Packing()), layer_of(Packing(bits=8), seed=1)]
    model = plain(layers)
    pack_linears(model, [("first", layers[0]), ("second", layers[1])])
    assert dict(weight_formats(model)) == {"first.weight": "u4", "second.weight": "u8"}


@pytest.mark.parametrize("by_row", [True, False])
def test_names_of_weights_that_are_not_packed(by_row: bool) -> None:
    layers = [layer_of(Packing()), layer_of(Packing(bits=8), seed=1), layer_of(Packing(), rows=32)]
    model = plain(layers, by_row=by_row)
    name_weights(
        model, [("layers.0.up.weight", layers[0].dequantized()), ("layers.1.up.weight", layers[1].dequantized())]
    )
    formats = formats_of(model)
    assert formats["layers"] == {"f32": 3} and formats["names"]["f32"][1:] == ["layers.*.up"]


def test_a_weight_that_the_model_does_not_have_is_refused() -> None:
    model = plain([layer_of(Packing())])
    with pytest.raises(ModelLoadError, match="does not multiply by the weight of other .*generate.weights: f32"):
        pack_linears(model, [("other", layer_of(Packing(), seed=1))])


@pytest.mark.parametrize("columns", [32, 40])
def test_groups_of_any_size_are_right(columns: int) -> None:
    """An uneven act-order leaves small blocks, for which there may be no kernel."""
    layer = layer_of(Packing(group_size=16, symmetric=False, act_order=True), rows=8, columns=columns)
    groups = layer.groups.copy()
    groups[:3] = layer.groups.max()
    odd: Any = QuantizedLinear(4, layer.values, layer.zero_points, layer.scales, groups)
    x = ops.parameter([-1, columns], ov.Type.f32)
    blocked = odd.blocked()
    found = compiled(ov.Model([product(ordered(x.output(0), blocked.order), blocked, "layer")], [x]))
    given = np.random.default_rng(0).standard_normal((2, columns), dtype=np.float32)
    np.testing.assert_allclose(found(given)[0], given @ odd.dequantized().T, rtol=1e-5, atol=1e-4)
