"""Models that NNCF and torchao quantized, as they come: one partition, kernels of 8 and 4 bits, eager's answers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchserve_openvino as tov

nncf = pytest.importorskip("nncf")


class Net(nn.Module):
    """Convolutions with a residual, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.second(x).relu()
        return self.last(nn.functional.max_pool2d(x, 2).mean((2, 3)))


SHAPE = (2, 3, 16, 16)
# Of all weights in 4 bits.
GROUPED = {"group_size": 64, "ratio": 1.0, "all_layers": True}


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model.eval(), (x,)).module(check_guards=False)


def data() -> list[Tensor]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=noise) for _ in range(8)]


def by_nncf(**how: Any) -> Any:
    return nncf.quantize(exported(Net(), data()[0]), nncf.Dataset(data()), **how)


def by_torchao(fold: bool, **how: Any) -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(**how))
    return by_quantizer(quantizer, exported(Net(), data()[0]), data(), fold)


def openvino_quantizer(mode: str, **how: Any) -> Any:
    """executorch's. Its package is large, and in no extra: these tests run where it is installed."""
    quantizers = pytest.importorskip("executorch.backends.openvino.quantizer")
    return quantizers.OpenVINOQuantizer(mode=quantizers.QuantizationMode[mode], **how)


def by_quantizer(quantizer: Any, model: Any, inputs: list[Tensor], fold: bool) -> Any:
    from torchao.quantization.pt2e import quantize_pt2e as pt2e

    prepared = pt2e.prepare_pt2e(model, quantizer)
    with torch.no_grad():
        for x in inputs:
            prepared(x)
    return pt2e.convert_pt2e(prepared, fold_quantize=fold)


def by_executorch(mode: str, fold: bool) -> Any:
    return by_quantizer(openvino_quantizer(mode), exported(Net(), data()[0]), data(), fold)


MADE: dict[str, Callable[[], Any]] = {
    "nncf": by_nncf,
    "nncf mixed": lambda: by_nncf(preset=nncf.QuantizationPreset.MIXED),
    "torchao": lambda: by_torchao(True),
    "torchao unfolded": lambda: by_torchao(False),
    "torchao dynamic": lambda: by_torchao(True, is_dynamic=True),
    "executorch": lambda: by_executorch("INT8_SYM", True),
    "executorch unfolded": lambda: by_executorch("INT8_SYM", False),
    "executorch mixed": lambda: by_executorch("INT8_MIXED", False),
    "executorch transformer": lambda: by_executorch("INT8_TRANSFORMER", False),
}


def kernels_of_one_right_partition(compiled: Any, model: nn.Module) -> set[tuple[str, str]]:
    """Compares answers, and returns kinds and precisions of the kernels."""
    with torch.no_grad():
        for factor in (1.0, 0.1, 5.0):
            x = torch.randn(SHAPE) * factor
            expected = model(x)
            # A value halfway between two integers may become either.
            torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    summary = compiled.report.to_dict()["summary"]
    assert summary["coverage"] == 1.0 and summary["partitions"] == 1 and summary["fallbacks"] == 0
    return {(kernel.kind, kernel.precision) for kernel in compiled.report.kernels()}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_quantized_network(made: str, frozen: bool) -> None:
    model = MADE[made]()
    compiled = tov.compile(model, dynamic=False)
    if frozen:
        compiled.freeze()
    kernels = kernels_of_one_right_partition(compiled, model)
    if made != "torchao dynamic":
        assert {("Convolution", "u8"), ("FullyConnected", "u8")} <= kernels
        assert not {("Convolution", "f32"), ("FullyConnected", "f32")} & kernels


@pytest.mark.parametrize(
    ("mode", "options", "precision"),
    [
        ("INT8_ASYM", {}, "u8"),
        ("INT8_SYM", {}, "i8"),
        ("INT4_SYM", GROUPED, "u4"),
        ("INT4_ASYM", GROUPED, "u4"),
        ("INT4_SYM", {**GROUPED, "group_size": -1}, "u4"),
    ],
)
def test_compressed_weights(mode: str, options: dict[str, Any], precision: str) -> None:
    layers, x = two_layers(), torch.randn(3, 128)
    given = {"dataset": nncf.Dataset([x]), **options} if options else {}
    model = nncf.compress_weights(exported(layers, x), mode=nncf.CompressWeightsMode[mode], **given)
    runs_in_bits(model, precision)


@pytest.mark.parametrize(
    ("mode", "options", "precision"),
    [
        ("INT8WO_ASYM", {}, "u8"),
        ("INT8WO_SYM", {}, "i8"),
        ("INT4WO_SYM", GROUPED, "u4"),
        ("INT4WO_ASYM", GROUPED, "u4"),
    ],
)
def test_weights_compressed_by_executorch(mode: str, options: dict[str, Any], precision: str) -> None:
    x = torch.randn(3, 128)
    runs_in_bits(by_quantizer(openvino_quantizer(mode, **options), exported(two_layers(), x), [x], False), precision)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 64)).eval()


def runs_in_bits(model: nn.Module, precision: str) -> None:
    """Compares the answers of two layers, and the precision of their kernels."""
    compiled = tov.compile(model, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 128)
            expected = model(x)
            # NNCF's own layers multiply in float16.
            torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    assert compiled.report.summary.coverage == 1.0 and compiled.report.fallbacks == []
    products = [kernel for kernel in compiled.report.kernels() if kernel.kind == "FullyConnected"]
    assert {kernel.precision for kernel in products} == {precision} and len(products) == 2


class TestByTorchAo:
    """Models that `quantize_fx.convert_fx` made, which compute on torch's own quantized tensors."""

    @staticmethod
    def made(model: nn.Module, engine: str) -> Any:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        torch.backends.quantized.engine = engine
        prepared = prepare_fx(model.eval(), get_default_qconfig_mapping(engine), (data()[0],))
        with torch.no_grad():
            for x in data():
                prepared(x)
        return convert_fx(prepared)

    @pytest.mark.parametrize("engine", ["x86", "onednn"])
    @pytest.mark.parametrize("backend", ["openvino", "export"])
    def test_answers_are_eagers(self, engine: str, backend: str) -> None:
        model = self.made(Net(), engine)
        compiled = tov.compile(model, backend=backend)
        kernels = kernels_of_one_right_partition(compiled, model)
        assert {("Convolution", "u8"), ("FullyConnected", "u8")} <= kernels

    def test_more_layers(self) -> None:
        class More(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(3, 8, 3, 2, 1)
                self.pool, self.last = nn.AdaptiveAvgPool2d(4), nn.Linear(8 * 16, 6)
                self.gate = nn.Conv2d(8, 8, 1, groups=4)

            def forward(self, x: Tensor) -> Tensor:
                x = torch.cat([self.a(x).relu(), nn.functional.interpolate(self.b(x), scale_factor=2.0)], 1)[:, :8]
                x = x * self.gate(x)
                return self.last(self.pool(x).flatten(1)).relu() + 1.0

        model = self.made(More(), "x86")
        compiled = tov.compile(model)
        x = torch.randn(SHAPE)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0.03 * float(expected.abs().max()))

    def test_a_layer_that_is_not_known_runs_as_it_is(self) -> None:
        model = self.made(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish()), "x86")
        compiled = tov.compile(model)
        x = torch.randn(SHAPE)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert any("quantized by torch.ao" in note for note in compiled.report.tracker.notes)
        assert compiled.report.fallbacks


def test_checks_of_an_exported_program_are_no_fallbacks() -> None:
    """torch.export asserts types where a model casts, which guards determine already."""

    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).relu() + x.to(torch.float64).sum().to(torch.float32) * 0

    x = torch.randn(3, 4)
    model = exported(Casts(), x)
    assert any("_assert_tensor_metadata" in str(node.target) for node in model.graph.nodes)
    compiled = tov.compile(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert not any("_assert_tensor_metadata" in each.op for each in compiled.report.fallbacks)

    @pytest.mark.parametrize("number", [lambda x: x + 1.5, lambda x: x * 2.0], ids=["sum", "product"])
    def test_a_number_beside_a_quantized_tensor_runs_as_it_is(self, number: Any) -> None:
        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)

            def forward(self, x: Tensor) -> Tensor:
                return number(self.conv(x))

        model, x = self.made(Shifted(), "x86"), torch.randn(SHAPE)
        compiled = tov.compile(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert any("quantized by torch.ao" in note for note in compiled.report.tracker.notes)
