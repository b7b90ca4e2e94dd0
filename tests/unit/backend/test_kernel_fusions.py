"""Kernel fusions for which OpenVINO gives wrong results or crashes."""

import copy

import pytest
import torch
from torch.nn import functional as F

import torchserve_openvino as tov


def attend(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


CASES = {
    "returned and added to": lambda q, k, v, b: ((o := attend(q, k, v)), o + b.relu()),
    "added to and returned": lambda q, k, v, b: ((o := attend(q, k, v)) + b.relu(), o),
    "minus an input": lambda q, k, v, b: ((o := attend(q, k, v)), o - b),
    "over an input": lambda q, k, v, b: ((o := attend(q, k, v)), o / (b * b + 1)),
    "scaled": lambda q, k, v, b: ((o := attend(q, k, v) * 2), (o - b) * b.sigmoid()),
    "gated": lambda q, k, v, b: ((o := attend(q, k, v) * b.sigmoid()), o + b.relu()),
    "two users": lambda q, k, v, b: (o := attend(q, k, v)).relu() * (o + b.relu()),
    "reshaped": lambda q, k, v, b: ((o := attend(q, k, v)).reshape(-1), o + b.relu()),
    "concatenated": lambda q, k, v, b: (torch.cat([o := attend(q, k, v), b.relu()], -1), o + b.relu()),
    "transposed": lambda q, k, v, b: (
        (o := attend(q, k, v).transpose(0, 1).contiguous()),
        o + b.transpose(0, 1).relu(),
    ),
    "torch's own": lambda q, k, v, b: ((o := F.scaled_dot_product_attention(q, k, v)), o + b.relu()),
    "one user": lambda q, k, v, b: attend(q, k, v) + b.relu(),
}


@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize("name", CASES)
def test_attention_with_several_users(name, shape) -> None:
    function = CASES[name]
    compiled = tov.compile(function, options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(2):
            inputs = [torch.randn(shape) for _ in range(4)]
            torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


NORMED = {
    "minus an input": lambda n, x, b: n(x) - b,
    "plus something computed": lambda n, x, b: b.relu() + n(x),
    "gated": lambda n, x, b: n(x) * b.sigmoid(),
    "chosen": lambda n, x, b: torch.where(b > 0, n(x), b),
    "returned as well": lambda n, x, b: ((y := n(x)), y - b),
    "its own input": lambda n, x, b: n(x) + x.relu(),
    "reshaped": lambda n, x, b: n(x).reshape(2, -1) + b.reshape(2, -1).relu(),
    "two": lambda n, x, b: n(x) + n(b),
    "a block": lambda n, x, b: (n(x).relu() + n(b)).relu() - x,
    "two users": lambda n, x, b: (y := n(x)).relu() * (y + b.relu()),
}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", NORMED)
def test_group_normalization_beside_something_else(name, precision) -> None:
    function, norm = NORMED[name], torch.nn.GroupNorm(2, 4)
    options = {"min_partition_us": 0, "config": {"INFERENCE_PRECISION_HINT": precision}}
    compiled = tov.compile(lambda x, b: function(norm, x, b), options=options)
    close = {"rtol": 1e-5, "atol": 1e-5} if precision == "f32" else {"rtol": 0.05, "atol": 0.1}
    with torch.no_grad():
        for _ in range(2):
            x, b = torch.randn(2, 4, 4, 5), torch.randn(2, 4, 4, 5)
            torch.testing.assert_close(compiled(x, b), function(norm, x, b), **close)
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


REDUCED = {
    "one less": lambda x: x.sum(-1) - 1,
    "times 3": lambda x: x.sum(1) * 3,
    "negated": lambda x: -x.sum((1, 2)),
    "taken away": lambda x: 50 - x.sum(-1, keepdim=True),
    "the largest": lambda x: x.amax(1) * 2 + 1,
    "of a mask": lambda x: (x > 2).sum(-1) - 1,
    "used twice": lambda x: ((n := x.sum(1)) - 1, n + 1),
    "two dimensions": lambda x: x[0].sum(-1) - 1,
    "four dimensions": lambda x: x[None].sum((1, 3)) * 2 - 1,
}


@pytest.mark.quick(kind=[torch.int64], dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", REDUCED)
def test_what_is_computed_of_a_sum_of_integers(name, kind, dynamic) -> None:
    function = REDUCED[name]
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    for shape in ((5, 4, 3), (6, 1, 7)):
        x = torch.randint(1, 5, shape).to(kind)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
    assert compiled.report.summary.coverage == 1.0


def _norm() -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(3).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        torch.nn.init.normal_(tensor)
    return norm


# `x` is (batch, 3, time), `w` has a number for each of the 3 channels.
SCALED = {
    "a head over time": lambda x, w, norm: norm(x.mean(-1)),
    "behind another": lambda x, w, norm: norm(x.mean(-1).relu()),
    "with its dimensions": lambda x, w, norm: norm(x.amax(-1, keepdim=True)),
    "times": lambda x, w, norm: x.norm(dim=-1) * w,
    "minus": lambda x, w, norm: x.sum(-1).tanh() * 2 - w,
    "over": lambda x, w, norm: x.mean(-1, keepdim=True) / w[:, None],
    "over the batch": lambda x, w, norm: x.mean(0) + w[:, None],
    "unsqueezed": lambda x, w, norm: x.mean(-1).unsqueeze(-1) * w[:, None],
    "a slope": lambda x, w, norm: F.prelu(x.sum(-1), w),
    "computed of numbers": lambda x, w, norm: x.mean(-1) * (w.exp() + 1),
    "a similarity": lambda x, w, norm: F.cosine_similarity(x, x.flip(0), dim=-1) + w,
    "a variance": lambda x, w, norm: x.var(-1).relu() * w,
    "counted": lambda x, w, norm: x.ne(0).float().sum(-1).relu() * w,
}


@pytest.mark.quick(dynamic=[False], backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_numbers_for_each_channel_behind_a_reduction(name, dynamic, backend) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = _norm(), torch.nn.Parameter(torch.randn(3))

        def forward(self, x):
            return SCALED[name](x, self.weight, self.norm)

    model = Model().eval()
    compiled = tov.compile(model, dynamic=dynamic, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for sizes in ((2, 4), (5, 7), (2, 4)):
            x = torch.randn(sizes[0], 3, sizes[1])
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.summary.coverage == 1.0


NUMBERED = {
    "divided": lambda x: x.mean(-1) / 3,
    "after another": lambda x: x.mean(-1).relu() / 3,
    "of two dimensions": lambda x: x[:, 0].mean(-1) / 3,
    "of four dimensions": lambda x: x[None].mean(-1) / 3,
    "of four, two at once": lambda x: x[None].sum((-1, -2)) / 3,
    "of five dimensions": lambda x: x[None, None].amax(-1) / 3,
    "a norm": lambda x: x.norm(dim=-1) / 3,
    "a variance": lambda x: torch.var_mean(x, dim=-1, correction=0)[0] / 3,
    "with its dimensions": lambda x: x.sum(-1, keepdim=True) / 3,
    "over the batch": lambda x: x.sum(0) / 7,
    "root of it": lambda x: ((x * x).mean(-1) + 1e-5).sqrt(),
    "bounded": lambda x: x.sum(-1).clamp(-0.1, 0.1) * 2 - 1,
    "a power": lambda x: (x.mean(-1) + 5) ** 2,
    "rounded": lambda x: (x.sum(-1) * 3).floor(),
    "under": lambda x: 3 / (x.mean(-1) + 9),
}


@pytest.mark.quick(channels=[3], dynamic=[False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_behind_a_reduction(name, dynamic, channels) -> None:
    function = NUMBERED[name]
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    for sizes in ((2, 6), (9, 5), (2, 6)):
        x = torch.randn(sizes[0], channels, sizes[1])
        torch.testing.assert_close(compiled(x), function(x))
    assert compiled.report.summary.coverage == 1.0


# `x` and `y` are (rows, 2), `w` has a number for each column.
MULTIPLIED = {
    "scaled": lambda x, y, w: (x @ y).relu() * w,
    "shifted": lambda x, y, w: (x @ y).tanh() + w,
    "turned": lambda x, y, w: (x @ y.mT).relu() * w,
    "in a batch": lambda x, y, w: torch.bmm(x.expand(3, -1, -1), y.expand(3, -1, -1)).sigmoid() - w,
    "a power": lambda x, y, w: torch.linalg.matrix_power(y, 3).relu() * w,
    "attention": lambda x, y, w: attend(x, y, y).relu() * w,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_numbers_for_each_column_behind_a_tiny_product(name, rows, dynamic) -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, -3.0]))
    compiled = tov.compile(
        lambda x, y: MULTIPLIED[name](x, y, weight), dynamic=dynamic, options={"min_partition_us": 0}
    )
    with torch.no_grad():
        for _ in range(2):
            x, y = torch.randn(rows, 2), torch.randn(2, 2)
            torch.testing.assert_close(compiled(x, y), MULTIPLIED[name](x, y, weight))
    assert compiled.report.summary.coverage == 1.0


CONCATENATED = {
    "returned": lambda x, y: ((c := torch.cat([x, x])), c.abs() * 2),
    "used": lambda x, y: (c := torch.cat([x, y])) + c.abs(),
    "stacked": lambda x, y: ((c := torch.stack([x, y])), c.abs(), c.exp()),
    "viewed": lambda x, y: ((c := torch.cat([x, y])), c.view(2, -1).abs() + 1),
    "alone": lambda x, y: torch.cat([x, y]).abs(),
}


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CONCATENATED)
def test_the_absolute_value_of_a_concatenation(name, dynamic, backend) -> None:
    function = CONCATENATED[name]
    compiled = tov.compile(function, dynamic=dynamic, backend=backend, options={"min_partition_us": 0})
    for size in (4, 6, 4):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(compiled(x, y), function(x, y))
    assert compiled.report.summary.coverage == 1.0


OF_WEIGHTS = {
    "times a number": lambda w: (w * 2).abs() + 0.25,
    "under a root": lambda w: ((w * 1).abs() + 0.25).sqrt(),
    "a matrix": lambda w: (w.view(2, 2) * 2).abs() + 0.25,
    "a number": lambda w: (w[0] * 2).abs() + 0.25,
    "put together": lambda w: torch.cat([w, w * 3]).abs() + 1,
    "divided": lambda w: (w / 2 - 1).abs() + 0.25,
    "in bfloat16": lambda w: (w.bfloat16() * 2).abs() + 0.25,
}


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_the_absolute_value_of_weights(name, backend) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([-1.0, 0.25, -1.5, -0.25]))

        def forward(self, x):
            return x + 1, OF_WEIGHTS[name](self.weight)

    model = Model().eval()
    compiled = tov.compile(model, backend=backend, options={"min_partition_us": 0})
    with torch.no_grad():
        for x in (torch.zeros(2), torch.ones(2)):
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.summary.coverage == 1.0


SCALARS = {
    "a layer": lambda x, layer: layer(x).view(()),
    "an activation": lambda x, layer: layer(x).relu().reshape(()) * 2,
    "a product of inputs": lambda x, layer: (x @ x.mT).squeeze(),
    "a batch": lambda x, layer: torch.bmm(x[None], layer.weight.t()[None]).reshape([]) + 1,
    "turned and flattened": lambda x, layer: layer(x).t().flatten().reshape([]),
    "a loss": lambda x, layer: F.mse_loss(layer(x).view([]), torch.tensor(1.0)),
}


@pytest.mark.quick(gradient=[False])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("backend", "dynamic"), [("openvino", False), ("openvino", True), ("openvino_ts", False)])
@pytest.mark.parametrize("name", SCALARS)
def test_a_product_as_a_scalar(name, backend, dynamic, gradient) -> None:
    layer = torch.nn.Linear(3, 1)

    def function(x):
        return SCALARS[name](x, layer)

    compiled = tov.compile(function, backend=backend, dynamic=dynamic, options={"min_partition_us": 0})
    for _ in range(2):
        x = torch.randn(1, 3, requires_grad=gradient)
        with torch.set_grad_enabled(gradient):
            answer, expected = compiled(x), function(x)
        torch.testing.assert_close(answer, expected)
        if gradient:
            torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (answer, expected)))
    assert compiled.report.summary.coverage == 1.0


PIXELS = {
    "behind an activation": lambda x, conv: conv(x.relu()),
    "behind a product": lambda x, conv: conv(x * x.sigmoid()),
    "of an input": lambda x, conv: conv(x),
    "beside the input": lambda x, conv: (conv(x.tanh()), x.clone()),
    "twice": lambda x, conv: conv(x.relu()).sum() + conv(x.relu() + 1),
}


@pytest.mark.quick(groups=[1])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("backend", "dynamic"), [("openvino", False), ("openvino", True), ("openvino_ts", False)])
@pytest.mark.parametrize("name", PIXELS)
def test_a_convolution_of_single_pixels_with_padding_and_strides(name, backend, dynamic, groups) -> None:
    conv = torch.nn.Conv2d(2, 4, 1, padding=1, stride=2, groups=groups)
    compiled = tov.compile(lambda x: PIXELS[name](x, conv), backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for size in (5, 6):
            x = torch.randn(1, 2, size, size)
            torch.testing.assert_close(compiled(x), PIXELS[name](x, conv))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_means_of_few_channels(pool, channels, dynamic, backend) -> None:
    """From the second inference on the plugin mixed in what its memory held before."""
    options = {"min_partition_us": 0}
    compiled = tov.compile(lambda x: pool(x, 2).mean((0, 2, 3)), backend=backend, dynamic=dynamic, options=options)
    with torch.no_grad():
        for batch in (2, 2, 3, 2):
            x = torch.randn(batch, channels, 6, 6) + batch
            torch.testing.assert_close(compiled(x), pool(x, 2).mean((0, 2, 3)))
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_batch_normalization_in_training_mode_after_pooling() -> None:
    model = torch.nn.Sequential(torch.nn.MaxPool2d(2), torch.nn.BatchNorm2d(3)).train()
    expected = copy.deepcopy(model)
    compiled = tov.compile(model, options={"min_partition_us": 0})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3, 6, 6)
            torch.testing.assert_close(compiled(x), expected(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
