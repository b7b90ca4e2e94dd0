"""The precision bf16x3: products on AMX, answers of f32."""

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset15 as ops
from torch import nn

import torchserve_openvino as tov
from torchserve_openvino.backend.runtime.build import build
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.config.openvino.precisions import no_bf16x3
from torchserve_openvino.passes.ov.bf16x3 import multiply_in_bf16x3
from torchserve_openvino.passes.pass_context import PassContext

HERE = no_bf16x3("CPU")
needs_amx = pytest.mark.skipif(HERE is not None, reason=f"bf16x3 {HERE}")
# Of the largest value, against float64.
TOLERANCE = 2e-5


class Layer(nn.Module):
    """A layer of an encoder, with queries, keys and values of one input."""

    def __init__(self, hidden: int, head: int, activation: str = "gelu") -> None:
        super().__init__()
        self.head, self.activation = head, activation
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )
        self.norm, self.last = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        y = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(y))
        return self.last(x + self.down(getattr(nn.functional, self.activation)(self.up(x))))


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 2
        self.reduce, self.first = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.spatial = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.second = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, channels, 1)
        self.skip = nn.Conv2d(channels, channels, 1)
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.second(self.spatial(torch.relu(self.first(self.reduce(x))))))
        return torch.relu(self.expand(y) + self.skip(x))


def check(model: nn.Module, *calls: torch.Tensor, dynamic: bool = False, **options: object) -> dict:
    """Compares each call with float64; returns the summary of the report."""
    torch.manual_seed(0)
    model = model.eval()
    compiled = tov.compile(model, dynamic=dynamic, options={"precision": "bf16x3", **options})
    with torch.no_grad():
        answers = [compiled(x) for x in calls]
        eager = [model(x) for x in calls]
        exact = [model.double()(x.double()) for x in calls]
    model.float()
    for answer, other, right in zip(answers, eager, exact, strict=True):
        scale = float(right.abs().max())
        assert float((answer - right).abs().max()) <= TOLERANCE * scale
        assert float((answer - other).abs().max()) <= TOLERANCE * scale
    report = compiled.report.to_dict()
    assert report["summary"]["coverage"] == 1.0 and report["summary"]["precision"] == "bf16x3"
    return report["summary"]


@needs_amx
@pytest.mark.parametrize(
    ("hidden", "head", "length", "split"),
    [
        (384, 64, 128, 6),
        (768, 128, 33, 6),
        # Of one row, reading weights takes the time.
        (768, 64, 1, 0),
        pytest.param(768, 64, 128, 6, marks=pytest.mark.slow),
        pytest.param(384, 128, 33, 6, marks=pytest.mark.slow),
    ],
)
def test_layers_of_encoders(hidden: int, head: int, length: int, split: int) -> None:
    torch.manual_seed(0)
    summary = check(Layer(hidden, head), torch.randn(1, length, hidden))
    products = summary["products"]
    assert (products["products"], products["bf16x3"]) == (6, split)
    assert products["multiplications"] == length * 12 * hidden**2
    assert ("bf16x3" in summary["precisions"]) == bool(split)


@needs_amx
@pytest.mark.parametrize("activation", ["relu", "silu", pytest.param("tanh", marks=pytest.mark.slow)])
def test_fused_activations(activation: str) -> None:
    torch.manual_seed(1)
    assert check(Layer(384, 64, activation), 3 * torch.randn(2, 64, 384))["products"]["bf16x3"] == 6


class Turned(nn.Module):
    """Transpositions before and behind a product, which the plugin would fuse with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(384, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x.transpose(1, 2)).transpose(1, 2) * 0.125).softmax(-1)


@needs_amx
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "shape", "split"),
    [
        (Turned(), (2, 384, 64), 1),
        (nn.Linear(384, 384), (2, 3, 32, 384), 1),
        (nn.Sequential(nn.Conv1d(512, 512, 3, padding=1), nn.GELU()), (2, 512, 64), 1),
        (nn.Conv2d(256, 256, 3, dilation=2, padding="same"), (1, 256, 20, 20), 1),
        (nn.Conv2d(512, 512, 3, groups=2), (1, 512, 14, 14), 0),
        (nn.Conv3d(256, 256, 3), (1, 256, 5, 8, 8), 1),
    ],
    ids=["turned", "rank4", "conv1d", "dilated", "groups", "conv3d"],
)
def test_forms(model: nn.Module, shape: tuple[int, ...], split: int, dynamic: bool) -> None:
    torch.manual_seed(7)
    summary = check(model, torch.randn(shape), dynamic=dynamic)
    assert summary["products"]["bf16x3"] == split or (dynamic and "Conv" in str(model))


@needs_amx
@pytest.mark.parametrize("shape", [(64, 384), (1, 384, 14, 14)])
def test_values_that_bfloat16_lacks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    model = (nn.Linear(384, 384) if len(shape) == 2 else nn.Conv2d(384, 384, 3)).eval()
    x = torch.randn(shape)
    largest = torch.finfo(torch.float32).max
    for position, value in enumerate((torch.inf, -torch.inf, torch.nan, largest, -largest)):
        x[(position * 7, 5) if len(shape) == 2 else (0, 5, position * 2, position * 2)] = value
    compiled = tov.compile(model, dynamic=False, options={"precision": "bf16x3"})
    with torch.no_grad():
        answer, eager = compiled(x), model(x)
    assert compiled.report.to_dict()["summary"]["products"]["bf16x3"] == 1
    assert torch.equal(answer.isnan(), eager.isnan()) and eager.isnan().any()
    assert torch.equal(answer.isinf(), eager.isinf()) and eager.isinf().any()
    assert torch.equal(answer[eager.isinf()], eager[eager.isinf()])
    finite = eager.isfinite()
    for values in (finite & (eager.abs() > 1e30), finite & (eager.abs() < 1e30)):
        assert float((answer - eager)[values].abs().max()) <= TOLERANCE * float(eager[values].abs().max())


@needs_amx
def test_open_sizes() -> None:
    torch.manual_seed(2)
    calls = [torch.randn(batch, length, 384) for batch, length in ((2, 33), (3, 128), (2, 17))]
    assert check(Layer(384, 64), *calls, dynamic=True)["products"]["bf16x3"] == 6


@needs_amx
@pytest.mark.parametrize(
    ("batch", "stride", "split"),
    [
        (1, 1, 5),
        # Of four pixels that would be split, a stride of 2 uses one.
        (2, 2, 4),
    ],
)
def test_convolutions_with_normalization_behind_them(batch: int, stride: int, split: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(512, 2048, 1, stride=stride), nn.ReLU(), Bottleneck(2048))
    summary = check(model, torch.randn(batch, 512, 14, 14))
    assert (summary["products"]["products"], summary["products"]["bf16x3"]) == (5, split)


@needs_amx
@pytest.mark.parametrize("backend", ["export", "openvino_ts"])
def test_other_backends(backend: str) -> None:
    torch.manual_seed(4)
    model, x = nn.Linear(512, 512).eval(), torch.randn(64, 512)
    compiled = tov.compile(model, dynamic=False, backend=backend, options={"precision": "bf16x3"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-4)
    assert compiled.report.to_dict()["summary"]["products"]["bf16x3"] == 1


@needs_amx
def test_a_cache_keeps_precisions_apart_and_the_share(tmp_path) -> None:
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 384)).eval(), torch.randn(64, 384)

    def run(precision: str) -> tuple[torch.Tensor, dict]:
        torch.compiler.reset()
        options = {"precision": precision, "model_caching": True, "cache_dir": str(tmp_path)}
        compiled = tov.compile(model, dynamic=False, options=options)
        with torch.no_grad():
            return compiled(x), compiled.report.to_dict()

    before, plain = run("f32")
    first, cold = run("bf16x3")
    second, warm = run("bf16x3")
    after, _ = run("f32")
    assert not torch.equal(first, before) and torch.equal(first, second) and torch.equal(before, after)
    assert "products" not in plain["summary"] and plain["summary"]["precision"] == "f32"
    assert warm["cache"]["imports"] == 1 and warm["summary"]["precision"] == "bf16x3"
    assert warm["summary"]["products"] == cold["summary"]["products"]


# --- the pass: it runs on any CPU -----------------------------------------------------------------------------------


def product(shape: list[int], weights: np.ndarray, **how: bool) -> ov.Model:
    parameter = ops.parameter(shape, np.float32)
    transposed = how.get("transpose_b", True)
    return ov.Model(
        [ops.matmul(parameter, ops.constant(weights), how.get("transpose_a", False), transposed)], [parameter]
    )


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def in_bf16x3(model: ov.Model) -> tuple[ov.Model, dict[str, int]]:
    """Returns a copy with products in bf16x3, and their share."""
    changed, context = model.clone(), PassContext()
    multiply_in_bf16x3(changed, context)
    return changed, context.products


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (product([64, 384], numbers(384, 384)), 1),
        (product([-1, -1, 384], numbers(384, 384)), 1),
        (product([64, 512], numbers(512, 384), transpose_b=False), 1),
        # Few rows, few columns, few terms.
        (product([8, 384], numbers(384, 384)), 0),
        (product([64, 1024], numbers(64, 1024)), 0),
        (product([1024, 64], numbers(1024, 64)), 0),
        # Weights for each item of a batch; an operand that is transposed.
        (product([4, 64, 384], numbers(4, 384, 384)), 0),
        (product([384, 64], numbers(384, 384), transpose_a=True), 0),
        # No bfloat16 is as large.
        (product([64, 384], np.full((384, 384), 3.4e38, np.float32)), 0),
        (product([64, 384], np.full((384, 384), np.inf, np.float32)), 0),
        (product([64, 384], np.full((384, 384), np.nan, np.float32)), 0),
    ],
)
def test_products_are_split_where_it_pays(model: ov.Model, split: int) -> None:
    changed, share = in_bf16x3(model)
    assert share["bf16x3"] == split
    assert sum(node.get_type_name() == "MatMul" for node in changed.get_ops()) == 1 + split


@needs_amx
def test_the_model_itself_stays_as_it_is() -> None:
    model = product([64, 384], numbers(384, 384))
    before = [node.get_type_name() for node in model.get_ordered_ops()]
    assert build(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16x3"}).products["bf16x3"] == 1
    assert [node.get_type_name() for node in model.get_ordered_ops()] == before


def test_products_of_one_operand_share_its_split() -> None:
    parameter = ops.parameter([2, 64, 384], np.float32)
    users = [ops.matmul(parameter, ops.constant(numbers(columns, 384)), False, True) for columns in (384, 512, 640)]
    changed, share = in_bf16x3(ov.Model(users, [parameter]))
    kinds = [node.get_type_name() for node in changed.get_ops()]
    assert share["bf16x3"] == 3 and kinds.count("Concat") == 1 and kinds.count("MatMul") == 6


def test_weights_of_few_bits_stay_as_they_are() -> None:
    parameter = ops.parameter([64, 384], np.float32)
    stored = ops.constant(np.arange(384 * 384).reshape(384, 384).astype(np.uint8))
    weights = ops.multiply(ops.convert(stored, "f32"), ops.constant(np.float32(0.01)))
    model = ov.Model([ops.matmul(parameter, weights, False, True)], [parameter])
    changed, share = in_bf16x3(model)
    assert share["bf16x3"] == 0
    assert any(
        node.get_element_type() == ov.Type.u8 for node in changed.get_ops() if node.get_type_name() == "Constant"
    )


@needs_amx
def test_one_square_weight_in_two_orientations() -> None:
    """The plugin would give both the same packed weights (`weight_packing.py`)."""
    weights, x = numbers(384, 384), numbers(64, 384)
    parameter = ops.parameter([64, 384], np.float32)
    constant = ops.constant(weights)
    model = ov.Model(
        [ops.matmul(parameter, constant, False, True), ops.matmul(parameter, constant, False, False)], [parameter]
    )
    for own in (False, True):
        built = build(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16x3"}, own_weights=own)
        one, other = built.compiled(x).values()
        for answer, exact in ((one, x @ weights.T), (other, x @ weights)):
            assert np.abs(answer - exact).max() <= TOLERANCE * np.abs(exact).max()


@needs_amx
def test_names_of_outputs_stay() -> None:
    model = product([64, 384], numbers(384, 384))
    model.outputs[0].get_tensor().set_names({"logits"})
    changed, _ = in_bf16x3(model)
    assert core().compile_model(changed, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).output("logits") is not None
